"""torch programs → graphs. Only these modules and the torch backend import torch."""
