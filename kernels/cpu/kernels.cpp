// All kernels for one instruction set: compiled once for each, with KVFERRY_ISA as the name of the table.
#include "attention.h"
#include "linear_quantized.h"
#include "quantize.h"
#include "sample.h"
#include "small.h"

extern "C" {
extern const Kernels KVFERRY_ISA;
const Kernels KVFERRY_ISA = {
    W,
    {embed<float>, embed<bf16>},
    {add_norm<float>, add_norm<bf16>},
    {gated<float>, gated<bf16>},
    {argmax<float>, argmax<bf16>},
    {draw<float>, draw<bf16>},
    {sum_parts<float>, sum_parts<bf16>},
    {{quantize<float, kBytes>, quantize<bf16, kBytes>},
     {quantize<float, kFineBytes>, quantize<bf16, kFineBytes>},
     {quantize<float, kNibbles>, quantize<bf16, kNibbles>}},
    pack_linear,
    {linear<float>, linear<bf16>},
    {{linear_bytes<float, 1>, linear_bytes<bf16, 1>},
     {linear_bytes<float, 2>, linear_bytes<bf16, 2>},
     {linear_nibbles<float>, linear_nibbles<bf16>}},
    {rotate_and_write<float>, rotate_and_write<bf16>},
    {attend<float>, attend<bf16>},
};
}
