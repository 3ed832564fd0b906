// Refuse every connection that leaves this host, and write it down. Node loads this before a script: --require.

const { appendFileSync } = require('node:fs');
const { Socket } = require('node:net');

const HERE = /^(127\.|::1$|localhost$|0\.0\.0\.0$)/;
const connect = Socket.prototype.connect;

Socket.prototype.connect = function (...given) {
  const [first] = Array.isArray(given[0]) ? given[0] : given;
  const options = typeof first === 'object' ? first : { port: first, host: given[1] };
  const host = options.path ? 'localhost' : (options.host ?? 'localhost');
  if (HERE.test(host)) return connect.apply(this, given);
  if (process.env.KVMESH_ATTEMPTS) appendFileSync(process.env.KVMESH_ATTEMPTS, `${host}\n`);
  process.nextTick(() => this.destroy(new Error(`clients under test may not leave this host: ${host}`)));
  return this;
};
