"""Save and load: the parameters of a finished run, or a whole state, as one safetensors file."""

from functitan.checkpoint.files import write_text, write_whole
from functitan.checkpoint.load import load_params
from functitan.checkpoint.save import save_params
from functitan.checkpoint.state import load_state, save_state

__all__ = ["load_params", "load_state", "save_params", "save_state", "write_text", "write_whole"]
