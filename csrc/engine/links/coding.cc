#include "engine/links/coding.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "base/clock.h"
#include "kernels/topk.h"

namespace dcoll {

plan::Coding measure_coding(const kernels::Encoding& encoding) {
  constexpr size_t kElements = size_t{512} << 10;
  constexpr int kTimes = 5;
  const bool gathered = encoding.codec == kernels::Codec::kTopK;
  const size_t k = kernels::top_count(kElements, gathered ? encoding.ratio : 1);
  const bool keeps = gathered || encoding.codec == kernels::Codec::kInt8;  // the error, as buckets do
  std::vector<float> values(kElements), error(keeps ? kElements : 0);
  for (size_t i = 0; i < kElements; ++i) values[i] = static_cast<float>(i * 2654435761u % 65521) / 65521 - 0.5f;
  std::vector<std::byte> message(gathered ? kernels::top_bytes(kElements, k)
                                          : kernels::encoded_bytes(encoding.codec, kElements));
  double encode_us = 1e9, decode_us = 1e9;
  const auto least = [](double& best, const auto& work) {
    const auto begin = Clock::now();
    work();
    best = std::min(best, 1e6 * seconds_between(begin, Clock::now()));
  };
  for (int again = 0; again < kTimes; ++again) {
    least(encode_us, [&] {
      float* const kept = keeps ? error.data() : nullptr;
      if (gathered) {
        kernels::encode_top(message.data(), values.data(), kElements, k, {.error = kept});
      } else {
        kernels::encode(encoding.codec, message.data(), values.data(), kElements, kept);
      }
    });
    least(decode_us, [&] {
      const void* const messages[] = {message.data()};
      if (gathered) {
        kernels::sum_top(values.data(), messages, kElements, k);
      } else {
        kernels::decode(encoding.codec, values.data(), message.data(), kElements);
      }
    });
  }
  constexpr double kBytes = kElements * sizeof(float);
  return {.share = kernels::encoded_share(encoding),
          .gathered = gathered,
          .encode_us_per_byte = encode_us / kBytes,
          .decode_us_per_byte = decode_us / kBytes};
}

const plan::Coding* Codings::find(const kernels::Encoding& encoding) const {
  const auto alike = [&](const auto& known) {
    return known.first.codec == encoding.codec && std::ilogb(known.first.ratio) == std::ilogb(encoding.ratio);
  };
  const auto found = std::ranges::find_if(measured_, alike);
  return found == measured_.end() ? nullptr : &found->second;
}

}  // namespace dcoll
