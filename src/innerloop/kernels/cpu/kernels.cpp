// Compiled once for every instruction set: its table of cores.
#include "channel.h"
#include "convolution.h"
#include "linear.h"
#include "momentum_backward.h"
#include "norm.h"
#include "scalar.h"

namespace innerloop {
namespace INNERLOOP_ISA {

bool takes_pairs = INNERLOOP_PAIR_UNIT;

extern const Core cores[kCores];
const Core cores[kCores] = {
    {sizeof(ScalarCall), scalar_scratch, scalar_run},
    {sizeof(ChannelCall), channel_scratch, channel_run},
    {sizeof(MomentumCall), momentum_scratch, momentum_run},
    {sizeof(ConvolutionCall), convolution_scratch, convolution_run},
    {sizeof(NormCall), norm_scratch, norm_run},
    {sizeof(LinearCall), no_scratch, linear_run},
    {sizeof(GateCall), no_scratch, gate_run},
};

}  // namespace INNERLOOP_ISA
}  // namespace innerloop
