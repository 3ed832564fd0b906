"""What engines that others wrote have in common behind our seam: vLLM, SGLang, TensorRT-LLM, attached servers."""
