// What dlsym() has found in a library that is looked up at run time.
#pragma once

namespace dcoll::device {

struct Symbol {
  void* at;
  template <typename Function>
  operator Function*() const {  // NOLINT: what it is assigned to knows its type
    return reinterpret_cast<Function*>(at);
  }
};

}  // namespace dcoll::device
