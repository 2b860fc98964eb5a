"""The core: attention and what a Transformer is built from. Knows no task, no file and no tokenizer.

Read in this order, first the way from the formula to a stack:

    mask         who may look at whom
    attention    the formula, stage by stage
    position     how attention, which sees a set, is told the order
    multihead    several attentions side by side
    block        attention and feed-forward with a way around each, repeated

then what these are made with:

    config       every variant as a value
    embed        tokens, patches and features become vectors
    feedforward  the half of a block that works on each token alone
    score        the scores that came before and beside the dot product
    cache        what a decoder has computed and need not compute again
    trace        any activation by its name, and another in its place
"""
