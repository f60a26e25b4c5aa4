"""Kernels in Triton, for CUDA devices. Linear operations of floats stay with torch (cuBLAS).

launch.py       how all of them are launched
plan.py         the host cuts a batch into tiles
write_kv.py     bias, split, rotary embedding and K/V write
attention.py    split attention
norm.py         residual addition and LayerNorm or RMSNorm
activation.py   bias and activation, SwiGLU
rope.py         rotary embedding
sampling.py     greedy, and with a temperature
codes.py       how weights in eight or four bits lie in memory
linear.py      products with them

Data are float16, bfloat16 or float32; what is added up is float32. A kernel's result for a row is the same bits
whatever else is in the batch. **None has run on a GPU yet**: the tests run them in Triton's interpreter, and compile
them for sm_80 and sm_90.
"""
