"""The endpoint picker for gateways: Envoy asks it where a request goes (docs/gateway.md)."""
