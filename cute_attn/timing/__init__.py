"""Predicted microseconds of an emulated launch, and where they go.

    emulator = Emulator(num_sms=132, checks="none", record=1)
    with cute_attn.emulated("sm_90a", emulator):
        cute_attn.flash_attn_func(q, k, v)
    for prediction in predict(emulator):
        print(prediction)

Kernels must have been compiled with CUTE_DSL_LINEINFO=1, since the model counts the machine code of
each PTX instruction.
"""

from .prediction import Prediction, Whole, predict
from .rates import Rates, RatesError, load_rates

__all__ = ["Prediction", "Rates", "RatesError", "Whole", "load_rates", "predict"]
