"""The parts that engines of others share behind our seam: vLLM, SGLang, TensorRT-LLM, attached servers."""
