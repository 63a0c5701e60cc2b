"""Number formats, quantizers and quantized pytrees."""

from fadex.quant.elements import (
    ELEMENTS,
    Element,
    decode_element,
    element_levels,
    encode_element,
)
from fadex.quant.export import (
    ExportedTree,
    format_from_json,
    from_state,
    load_quantized,
    save_quantized,
    shardings_for,
    to_state,
)
from fadex.quant.formats import Format, fp8, int_group, mxfp4, mxfp6, mxfp8, nf4, nvfp4
from fadex.quant.four_over_six import FourOverSix, nvfp4_4o6
from fadex.quant.interop import QArrayFields, from_qwix, to_qwix
from fadex.quant.kernels.fused_quantize import fused_quantize
from fadex.quant.matmul import qmatmul
from fadex.quant.packing import pack, packed_length, repack, unpack
from fadex.quant.qarray import QuantizedArray, quantize_array, quantize_dequantize
from fadex.quant.qat import fake_quant, zoe_surrogate
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
from fadex.quant.recipes import Recipe, Rule
from fadex.quant.site import QuantizedSite, Site, calibrate_activations, site_matmul
from fadex.quant.tree import (
    QuantizationReport,
    ReportRow,
    bits_per_weight,
    calibrate_special_values,
    combine_quantized,
    dequantize,
    partition_quantized,
    quantization_report,
    quantize,
)

__all__ = [
    "ELEMENTS",
    "Element",
    "ExportedTree",
    "Format",
    "FourOverSix",
    "QArrayFields",
    "QuantizationReport",
    "QuantizedArray",
    "QuantizedSite",
    "RaZeR",
    "Recipe",
    "ReportRow",
    "Rule",
    "Site",
    "bits_per_weight",
    "calibrate_activations",
    "calibrate_special_values",
    "combine_quantized",
    "decode_element",
    "dequantize",
    "element_levels",
    "encode_element",
    "fake_quant",
    "format_from_json",
    "fp8",
    "from_qwix",
    "from_state",
    "fused_quantize",
    "int_group",
    "load_quantized",
    "mxfp4",
    "mxfp6",
    "mxfp8",
    "nf4",
    "nvfp4",
    "nvfp4_4o6",
    "pack",
    "packed_length",
    "partition_quantized",
    "qmatmul",
    "quantization_report",
    "quantize",
    "quantize_array",
    "quantize_dequantize",
    "quantize_razer",
    "razer_e3m3",
    "razer_e4m3",
    "razer_scales",
    "razer_selector",
    "repack",
    "save_quantized",
    "shardings_for",
    "site_matmul",
    "special_value_errors",
    "to_qwix",
    "to_state",
    "to_two_pass",
    "unpack",
    "zoe_surrogate",
]
