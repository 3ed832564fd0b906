"""Turn a model's raw text into prose, thoughts and tool calls: pure machines that read it piece by piece."""
