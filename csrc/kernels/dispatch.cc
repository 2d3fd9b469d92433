// Chooses the widest instruction set that this CPU and this build have.
#include "kernels/dispatch.h"

#include <atomic>

#include "kernels/reduce.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace dcoll::kernels {
namespace {

#if defined(__x86_64__)
// Asked of CPUID itself, because not every compiler's __builtin_cpu_supports knows the name. The AVX2 test beside it
// covers whether the operating system saves the registers.
bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
#endif

// Null when this CPU or this build lacks it.
const Kernels* find(std::string_view isa) {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && has_f16c();
  if (isa == "avx512vnni") return avx512 && __builtin_cpu_supports("avx512vnni") ? &avx512vnni_kernels() : nullptr;
  if (isa == "avx512") return avx512 ? &avx512_kernels() : nullptr;
  if (isa == "avx2") return __builtin_cpu_supports("avx2") && has_f16c() ? &avx2_kernels() : nullptr;
#endif
  return isa == "generic" ? &generic_kernels() : nullptr;
}

const Kernels* best() {
  for (const std::string_view isa : {"avx512vnni", "avx512", "avx2"}) {
    if (const Kernels* kernels = find(isa)) return kernels;
  }
  return &generic_kernels();
}

// Null until somebody asks, which may be another file's static initialiser.
constinit std::atomic<const Kernels*> current{nullptr};

// Not inline: the first call comes here.
const Kernels& choose() {
  const Kernels* none = nullptr;
  current.compare_exchange_strong(none, best());  // unless set_isa() was first
  return *current.load();
}

}  // namespace

const Kernels& active_kernels() {
  const Kernels* kernels = current.load(std::memory_order_relaxed);
  return kernels != nullptr ? *kernels : choose();
}

std::string_view active_isa() { return active_kernels().isa; }

bool set_isa(std::string_view isa) {
  const Kernels* kernels = find(isa);
  if (kernels) current.store(kernels, std::memory_order_relaxed);
  return kernels != nullptr;
}

}  // namespace dcoll::kernels
