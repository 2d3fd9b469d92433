// A stream of the emulated device whose kernel ends when it is told to.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "device/device.h"

namespace dcoll::test {

struct Held {
  device::Device& device = device::device_of(device::kEmulated);
  const device::Stream stream = device.make_stream();
  std::atomic<bool> held{true};
  Held() {
    device::put_into_emulated(stream, [this] {
      while (held.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
  }
  ~Held() {
    held.store(false);
    device.destroy_stream(stream);
  }
};

}  // namespace dcoll::test
