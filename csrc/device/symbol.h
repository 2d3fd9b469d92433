// A library that is looked up at run time.
#pragma once

#include <dlfcn.h>

#include <initializer_list>
#include <string>

namespace dcoll::device {

// What dlsym() has found.
struct Symbol {
  void* at;
  template <typename Function>
  operator Function*() const {  // NOLINT: what it is assigned to knows its type
    return reinterpret_cast<Function*>(at);
  }
};

class Library {
 public:
  std::string missing;  // why it cannot be used; "": it can

 protected:
  // By the first of the names under which it is loaded already, else under which it can be.
  explicit Library(std::initializer_list<const char*> names) {
    for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
      for (const char* const name : names) {
        if (library_ == nullptr) library_ = dlopen(name, flags);
      }
    }
    if (library_ == nullptr) note_error();
  }
  Symbol find(const char* name) {
    void* const at = library_ != nullptr ? dlsym(library_, name) : nullptr;
    if (at == nullptr && library_ != nullptr) note_error();
    return {at};
  }

  void* library_ = nullptr;

 private:
  void note_error() {
    const char* const why = dlerror();
    missing = why != nullptr ? why : "it cannot be loaded";
  }
};

}  // namespace dcoll::device
