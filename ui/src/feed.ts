// Read the feed. It is fetched, not an EventSource: the API key goes into a header and never into the URL.

const KEY = "kvmesh-api-key";
const SILENT_MS = 8000; // the feed says something twice a second

export type Status = "live" | "connecting" | "key" | "refused";

export interface Handler {
  message(kind: string, data: any): void;
  status(status: Status, why: string): void;
}

export function savedKey(): string {
  return sessionStorage.getItem(KEY) ?? "";
}

export function saveKey(key: string): void {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export class Feed {
  private abort = new AbortController();
  private tries = 0;

  constructor(private readonly url: string, private readonly handler: Handler) {}

  restart(): void {
    this.abort.abort();
    this.abort = new AbortController();
    this.tries = 0;
    void this.run(this.abort);
  }

  private async run(abort: AbortController): Promise<void> {
    while (!abort.signal.aborted) {
      this.handler.status("connecting", this.tries ? "the connection was lost" : "");
      let why = "the frontend does not answer";
      try {
        const key = savedKey();
        const headers: Record<string, string> = key ? { authorization: `Bearer ${key}` } : {};
        const reply = await fetch(this.url, { headers, signal: abort.signal, cache: "no-store", credentials: "omit" });
        if (reply.status === 401 || reply.status === 403) {
          this.handler.status("key", await messageOf(reply));
          return;
        }
        if (reply.ok && reply.body) {
          await this.read(reply.body, abort.signal);
          why = "the frontend has ended the feed";
        } else why = await messageOf(reply);
      } catch (error) {
        if (abort.signal.aborted) return;
      }
      this.tries += 1;
      this.handler.status("connecting", why);
      await new Promise((resolve) => setTimeout(resolve, Math.min(5000, 300 * 2 ** Math.min(this.tries, 5))));
    }
  }

  private async read(body: ReadableStream<Uint8Array>, signal: AbortSignal): Promise<void> {
    const reader = body.getReader();
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { done, value } = await soon(reader.read(), SILENT_MS, signal);
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop() ?? "";
      for (const event of events) this.take(event);
    }
  }

  private take(event: string): void {
    let kind = "", data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (!data) return;
    this.tries = 0;
    this.handler.message(kind, JSON.parse(data));
    this.handler.status("live", "");
  }
}

function soon<T>(promise: Promise<T>, ms: number, signal: AbortSignal): Promise<T> {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error("silent")), ms);
    signal.addEventListener("abort", () => reject(new Error("aborted")), { once: true });
    promise.then(resolve, reject).finally(() => clearTimeout(timer));
  });
}

export async function messageOf(reply: Response): Promise<string> {
  try {
    return String((await reply.json()).error.message);
  } catch {
    return `the frontend answered ${reply.status}`;
  }
}
