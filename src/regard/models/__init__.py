"""Models: wiring, and nothing but wiring. The parts are in `regard.nn`."""

from regard.models.config import ModelConfig
from regard.models.transformer import Decoder, Encoder, EncoderDecoder, Model, State, build

__all__ = ["Decoder", "Encoder", "EncoderDecoder", "Model", "ModelConfig", "State", "build"]
