"""The inner loops of dte_dist, one module per kind of device, all with the same functions.

`on(device)` returns `kernels.cpu` (numba loops over CPU memory) or `kernels.torch_ops` (plain torch ops, any device):

| function | does |
|---|---|
| `diff(flat, begin, end, known, positions, bits) -> int` | compare elements [begin, end) of `flat` with `known`; write sorted positions (relative to `begin`) and new bits; return how many |
| `read(flat, begin, out)` | copy elements [begin, begin + len(out)) of `flat` to `out` |
| `write(flat, begin, bits)` | copy `bits` to elements [begin, begin + len(bits)) of `flat` |
| `scatter(flat, positions, bits)` | write each bit pattern to its position in `flat` |
| `put(array, positions, bits)` | the same into one contiguous array |
| `encode_u16(positions, length) -> Tensor` | blocks of 65536: uint32 counts, then uint16 offsets, as bytes |
| `decode_u16(stream, count, length, positions) -> bool` | the reverse; False if the counts or the order are not sound |
| `sorted_below(positions, length) -> bool` | strictly increasing, none negative, none >= length |
| `checksum(frame, skip) -> int` | 64 bits over all 8-byte words; word number `skip` counts as zero |
| `translate(remap, first, positions, bits) -> (positions, bits)` | positions `first + p` of a source's flat space into a receiver's, dropping what it does not hold |

`flat` is a `FlatTensors` (change/flat.py): many tensors seen as one array of elements of one width.
"""
