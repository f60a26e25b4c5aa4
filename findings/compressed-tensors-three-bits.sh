#!/bin/sh
# compressed-tensors 0.20.1: weights of 3, 5, 6 and 7 bits that an older release packed are read as other numbers.
#
# The format `pack-quantized` has integers in words of 32 bits. Up to 0.17.1 a word holds whole integers: ten of three bits,
# and two bits stay unused. Since 0.19.0 they are packed without gaps, and one may begin in a word and end in the next.
# The format's name is the same. A new reader takes old words without an error, and beyond the first word its integers
# begin at other bits. One, two, four and eight bits divide 32, and did not change.
#
# Seen with: compressed-tensors 0.17.1 and 0.20.1, torch 2.13.0, transformers 5.23.0, Python 3.11. Prints how many of 64
# integers are read back, and fails when all are.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check compressed-tensors==0.20.1 torch==2.13.0 transformers==5.23.0
"$folder/env/bin/pip" install --quiet --disable-pip-version-check --no-deps --target "$folder/old" compressed-tensors==0.17.1
cat > "$folder/pack.py" <<'PYTHON'
import sys

import compressed_tensors
import torch

try:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
except ImportError:  # where they were before
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32, unpack_from_int32

BITS = range(1, 9)
integers = {bits: (torch.arange(64) % (1 << bits) - (1 << bits - 1)).to(torch.int8).reshape(1, 64) for bits in BITS}
if sys.argv[1] == "write":
    assert compressed_tensors.__version__ == "0.17.1"
    torch.save({bits: pack_to_int32(integers[bits], bits) for bits in BITS}, sys.argv[2])
else:
    assert compressed_tensors.__version__ == "0.20.1"
    old, read = torch.load(sys.argv[2]), {}
    for bits in BITS:
        new = pack_to_int32(integers[bits], bits)
        assert torch.equal(unpack_from_int32(new, bits, integers[bits].shape), integers[bits])
        read[bits] = int((unpack_from_int32(old[bits], bits, integers[bits].shape) == integers[bits]).sum())
        print(f"{bits} bits: {old[bits].shape[1]} words before, {new.shape[1]} now; {read[bits]} of 64 are read back")
        assert (read[bits] == 64) == (bits in (1, 2, 4, 8))
PYTHON
PYTHONPATH="$folder/old" "$folder/env/bin/python" -W ignore "$folder/pack.py" write "$folder/words.pt"
"$folder/env/bin/python" -W ignore "$folder/pack.py" read "$folder/words.pt"
