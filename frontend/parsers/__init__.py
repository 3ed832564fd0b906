"""From a model's raw text to prose, thoughts and tool calls: pure machines that read it piece by piece."""
