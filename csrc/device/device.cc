#include "device/device.h"

namespace dcoll::device {

Device& device_of(int number) { return is_emulated(number) ? emulated_device() : cuda_device(number); }

const char* kind_name(int number) { return number == kHost ? "cpu" : is_emulated(number) ? "emulated" : "cuda"; }

}  // namespace dcoll::device
