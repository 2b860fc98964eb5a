"""Models: how the parts of `regard.nn` are connected.

config       the settings of a model
recipe       presets and recipes, which contain them
transformer  encoder-decoder, decoder and encoder; `build` makes a model from its config
recurrent    the encoder-decoder before the Transformer
folder       a saved model
"""
