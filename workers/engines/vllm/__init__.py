"""The vLLM engine: its AsyncLLM in our worker process. Written against vLLM 0.32."""
