"""Number formats, quantizers and quantized pytrees."""

from fadex.quant.elements import (
    ELEMENTS,
    Element,
    decode_element,
    element_levels,
    encode_element,
)
from fadex.quant.formats import Format, fp8, int_group, mxfp4, mxfp6, mxfp8, nf4, nvfp4
from fadex.quant.four_over_six import FourOverSix, nvfp4_4o6
from fadex.quant.packing import pack, packed_length, repack, unpack
from fadex.quant.qarray import QuantizedArray, quantize_array
from fadex.quant.razer import (
    RaZeR,
    quantize_razer,
    razer_e3m3,
    razer_e4m3,
    razer_scales,
    razer_selector,
    special_value_errors,
    to_two_pass,
)

__all__ = [
    "ELEMENTS",
    "Element",
    "Format",
    "FourOverSix",
    "QuantizedArray",
    "RaZeR",
    "decode_element",
    "element_levels",
    "encode_element",
    "fp8",
    "int_group",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nf4",
    "nvfp4",
    "nvfp4_4o6",
    "pack",
    "packed_length",
    "quantize_array",
    "quantize_razer",
    "razer_e3m3",
    "razer_e4m3",
    "razer_scales",
    "razer_selector",
    "repack",
    "special_value_errors",
    "to_two_pass",
    "unpack",
]
