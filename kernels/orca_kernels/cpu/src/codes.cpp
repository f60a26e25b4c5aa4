// Products of weights in codes, by the instruction set that this is compiled for.
#if defined(__AMX_INT8__)
#include "amx_codes.h"
#elif defined(__AVX512VNNI__)
#include "vnni.h"
#else
#include "kernels.h"
#endif

namespace {

template <Type TYPE>
void product(const Gemm& g, int panel, int last) {
#if defined(__AMX_INT8__)
  if constexpr (TYPE == Type::i8 || TYPE == Type::i4 || TYPE == Type::grouped128) gemm_tiles_of_codes<TYPE>(g, panel, last);
  else gemm_vnni<TYPE>(g, panel, last);
#elif defined(__AVX512VNNI__)
  gemm_vnni<TYPE>(g, panel, last);
#else
  gemm_opened<TYPE>(g, panel, last);
#endif
}

}  // namespace

void orca::gemm_codes(const Gemm& g, int panel, int last) {
  switch (g.weights->type) {
    case Type::i8: return product<Type::i8>(g, panel, last);
    case Type::i4: return product<Type::i4>(g, panel, last);
    case Type::blocks8: return product<Type::blocks8>(g, panel, last);
    case Type::blocks4: return product<Type::blocks4>(g, panel, last);
    case Type::grouped128: return product<Type::grouped128>(g, panel, last);
    case Type::grouped64: return product<Type::grouped64>(g, panel, last);
    case Type::grouped32: return product<Type::grouped32>(g, panel, last);
    case Type::f32:
    case Type::bf16: return;
  }
}
