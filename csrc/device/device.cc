#include "device/device.h"

namespace dcoll::device {

Device& device_of(int number) { return number == kEmulated ? emulated_device() : cuda_device(number); }

const char* kind_name(int number) { return number == kHost ? "cpu" : number == kEmulated ? "emulated" : "cuda"; }

}  // namespace dcoll::device
