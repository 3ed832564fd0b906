"""vLLM behind the engine seam: its AsyncLLM in our worker host. Written against vLLM 0.32."""
