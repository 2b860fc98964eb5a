"""The core: attention and what a Transformer is built from. Knows no task, no file and no tokenizer.

Read in this order: `mask`, `attention`, `position`, `multihead`, `block`; then `cache` and `trace`.
"""
