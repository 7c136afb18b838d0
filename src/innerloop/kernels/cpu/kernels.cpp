// Compiled once for every instruction set: its table of cores.
#include "channel.h"
#include "scalar.h"

namespace innerloop {
namespace INNERLOOP_ISA {

extern const Core cores[kCores];
const Core cores[kCores] = {
    {sizeof(ScalarCall), scalar_scratch, scalar_run},
    {sizeof(ChannelCall), channel_scratch, channel_run},
};

}  // namespace INNERLOOP_ISA
}  // namespace innerloop
