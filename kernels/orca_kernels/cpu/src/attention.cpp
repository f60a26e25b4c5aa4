// Attention of the instruction set that this is compiled for.
#if defined(__AMX_BF16__)
#include "amx_attention.h"
#elif defined(__AVX512BF16__)
#include "bf16_attention.h"
#else
#include "kernels.h"
#endif

void orca::attend_cache(const Attention& a, float* scratch) {
#if defined(__AMX_BF16__)
  attention_in_pairs<OnTiles>(a, scratch);
#elif defined(__AVX512BF16__)
  attention_in_pairs<InPairs>(a, scratch);
#else
  attention(a, scratch);
#endif
}
