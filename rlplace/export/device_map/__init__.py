"""`device_map`: a placement as a Hugging Face device map, what it takes in memory and what it costs.

`projection` says where each module is, and `format` writes the map.
"""

from rlplace.export.device_map.format import DEVICE_MAP
from rlplace.export.device_map.projection import Projection, device_map, map_devices, map_places, project

__all__ = ["DEVICE_MAP", "Projection", "device_map", "map_devices", "map_places", "project"]
