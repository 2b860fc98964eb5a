"""Attention and the other parts of a Transformer, independent of tasks, files and tokenizers.

Read in this order, from the formula to a stack of blocks:

    mask         which key each query may attend to
    attention    scaled dot-product attention, stage by stage
    position     position encodings
    multihead    several attentions in parallel
    mixer        how a layer mixes tokens: full attention, a window, or something else
    block        attention and feed-forward with residual connections, repeated

then the parts they use:

    tokens       positions, padding and documents of a batch
    texts        packed texts as rows of their own
    blocks       which blocks of the attention matrix a mask leaves visible
    banded       attention that skips the others
    plan         which calls compute the visible ones
    sums         the sums over keys of linear attention
    chunks       such sums over earlier tokens, chunk by chunk
    patterns     masks of sparse attention: prefixes, global tokens, random blocks
    config       every variant of the architecture as a setting
    embedding    tokens, image patches and features as vectors
    feedforward  the layer that transforms each token by itself
    norm         layer norm and RMS norm
    score        alternatives to the dot product
    cache        the KV cache
    parts        one sequence on several processes
    trace        read any activation by its name, or replace it
"""
