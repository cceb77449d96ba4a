"""Save and load: the parameters of a finished run as one safetensors file."""

from functitan.checkpoint.files import write_text, write_whole
from functitan.checkpoint.load import load_params
from functitan.checkpoint.save import save_params

__all__ = ["load_params", "save_params", "write_text", "write_whole"]
