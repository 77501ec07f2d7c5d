"""The network: assembled DeepSeek-V4 and its multi-token prediction block."""
