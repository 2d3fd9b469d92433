// The devices there are, for device.cc.
#pragma once

#include "device/device.h"

namespace dcoll::device {

Device& cuda_device(int number);
Device& emulated_device();

}  // namespace dcoll::device
