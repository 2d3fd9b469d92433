// The loops over elements are in simd_kernels.h; here they are put together, in portions that stay in the first cache.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>

#include "base/error.h"
#include "kernels/cast.h"
#include "kernels/codec.h"
#include "kernels/dispatch.h"
#include "kernels/float_state.h"
#include "kernels/reduce.h"
#include "kernels/topk.h"

namespace dcoll::kernels {
namespace {

constexpr size_t kPortion = 8 * kCodecBlock;
constexpr std::array<std::string_view, 6> kNames{"", "fp16", "bf16", "int8", "topk", "fp32"};
constexpr std::string_view kAuto = "auto ", kStochastic = " stochastic";
constexpr std::array<std::string_view, 3> kExchanges{"", " gather", " owners"};

DType dtype_of(Codec codec) { return codec == Codec::kFloat16 ? DType::kFloat16 : DType::kBFloat16; }

char* bytes(void* at) { return static_cast<char*>(at); }
const char* bytes(const void* at) { return static_cast<const char*>(at); }

// `first`: the number of the portion's first element, for what is drawn.
size_t encode_portion(Codec codec, void* dst, const float* src, size_t count, const Key& key, size_t first) {
  const Kernels& kernels = active_kernels();
  if (codec == Codec::kFloat32) {
    std::memcpy(dst, src, count * sizeof(float));
    return 0;
  }
  if (codec == Codec::kInt8) {
    key ? kernels.draw_steps(bytes(dst), bytes(src), count, *key, first)
        : kernels.quantize(bytes(dst), bytes(src), count);
    return 0;
  }
  if (codec == Codec::kBFloat16) {
    key ? kernels.draw_bfloat16(bytes(dst), bytes(src), count, *key, first)
        : cast(dst, DType::kBFloat16, src, DType::kFloat32, count);
    return 0;
  }
  const size_t beyond = kernels.count_beyond_half(bytes(src), count);
  alignas(64) float kept[kPortion];
  if (beyond > 0) {
    kernels.clamp_to_half(bytes(kept), bytes(src), count);
    src = kept;
  }
  key ? kernels.draw_half(bytes(dst), bytes(src), count, *key, first)
      : cast(dst, DType::kFloat16, src, DType::kFloat32, count);
  return beyond;
}

void decode_portion(Codec codec, float* dst, const void* src, size_t count) {
  if (codec == Codec::kFloat32) {
    std::memcpy(dst, src, count * sizeof(float));
  } else if (codec == Codec::kInt8) {
    active_kernels().dequantize(bytes(dst), bytes(src), count);
  } else {
    cast(dst, DType::kFloat32, src, dtype_of(codec), count);
  }
}

// Of what encoding lost, where the value was no number, or what comes next would not be one either.
float finite_or(float x, float other) { return x - x == 0.0f ? x : other; }

template <class Work>
void in_portions(size_t count, const Work& work) {
  for (size_t at = 0; at < count; at += kPortion) work(at, std::min(kPortion, count - at));
}

}  // namespace

std::string_view codec_name(Codec codec) { return kNames[static_cast<size_t>(codec)]; }

std::string encoding_name(const Encoding& encoding) {
  std::string name(encoding.if_it_pays ? kAuto : "");
  name += codec_name(encoding.codec);
  if (encoding.stochastic) name += kStochastic;
  if (encoding.codec != Codec::kTopK) return name;
  std::array<char, 32> digits{};
  name += ' ' + std::string(digits.data(), std::to_chars(digits.begin(), digits.end(), encoding.ratio).ptr);
  return name + std::string(kExchanges[static_cast<size_t>(encoding.exchange)]);
}

Encoding encoding_named(std::string_view name) {
  if (name.starts_with(kAuto)) {
    Encoding encoding = encoding_named(name.substr(kAuto.size()));
    encoding.if_it_pays = static_cast<bool>(encoding);
    return encoding;
  }
  if (name.ends_with(kStochastic)) {
    Encoding encoding = encoding_named(name.substr(0, name.size() - kStochastic.size()));
    const bool rounds =
        encoding.codec == Codec::kFloat16 || encoding.codec == Codec::kBFloat16 || encoding.codec == Codec::kInt8;
    if (!rounds || encoding.stochastic) {
      throw ArgumentError("'" + std::string(name) + "': only fp16, bf16 and int8 can be rounded at random.");
    }
    encoding.stochastic = true;
    return encoding;
  }
  const std::string_view codec = name.substr(0, name.find(' '));
  const auto found = std::find(kNames.begin(), kNames.end(), codec);
  Encoding encoding;
  if (found != kNames.end()) encoding.codec = static_cast<Codec>(found - kNames.begin());
  if (encoding.codec == Codec::kTopK) {
    for (const Exchange exchange : {Exchange::kGather, Exchange::kOwners}) {
      const std::string_view suffix = kExchanges[static_cast<size_t>(exchange)];
      if (!name.ends_with(suffix)) continue;
      name.remove_suffix(suffix.size());
      encoding.exchange = exchange;
      break;
    }
    const char* const begin = name.data() + std::min(name.size(), codec.size() + 1);
    const auto [end, failure] = std::from_chars(begin, name.data() + name.size(), encoding.ratio);
    if (failure != std::errc() || end != name.data() + name.size()) encoding.ratio = 0;
    if (!(encoding.ratio > 0 && encoding.ratio <= 1)) {
      throw ArgumentError("'" + std::string(name) + "': top-k takes a share that is greater than 0 and at most 1, as " +
                          "in 'topk 0.01'.");
    }
  } else if (found == kNames.end() || codec.size() != name.size()) {
    throw ArgumentError("No codec '" + std::string(name) +
                        "'; allowed are fp16, bf16, int8, topk with a share, fp32, "
                        "'auto' and one of these, fp16, bf16 or int8 and 'stochastic', and '' for none.");
  }
  return encoding;
}

double encoded_share(const Encoding& encoding) {
  constexpr size_t kLong = size_t{512} << 10;
  const size_t bytes = encoding.codec == Codec::kTopK ? top_bytes(kLong, top_count(kLong, encoding.ratio))
                                                      : encoded_bytes(encoding.codec, kLong);
  return static_cast<double>(bytes) / (kLong * sizeof(float));
}

size_t encoded_bytes(Codec codec, size_t count) {
  if (codec == Codec::kFloat32) return 4 * count;
  if (codec != Codec::kInt8) return 2 * count;
  return count + (count + kCodecBlock - 1) / kCodecBlock * sizeof(float);
}

// splitmix64 (G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators", 2014).
Key derived(const Key& key, uint64_t number) {
  if (!key) return key;
  uint64_t x = *key + 0x9e3779b97f4a7c15u * (number + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

size_t encode(Codec codec, void* dst, const float* src, size_t count, float* error, const Key& key) {
  const KeepSubnormals keep;
  size_t beyond = 0;
  in_portions(count, [&](size_t at, size_t n) {
    char* const to = bytes(dst) + encoded_bytes(codec, at);
    if (error == nullptr) {
      beyond += encode_portion(codec, to, src + at, n, key, at);
      return;
    }
    alignas(64) float whole[kPortion], decoded[kPortion];
    for (size_t i = 0; i < n; ++i) whole[i] = src[at + i] + error[at + i];
    beyond += encode_portion(codec, to, whole, n, key, at);
    decode_portion(codec, decoded, to, n);
    for (size_t i = 0; i < n; ++i) {
      error[at + i] = finite_or(whole[i] - decoded[i], finite_or(error[at + i], 0.0f));
    }
  });
  return beyond;
}

void decode(Codec codec, float* dst, const void* src, size_t count) {
  const KeepSubnormals keep;
  in_portions(count,
              [&](size_t at, size_t n) { decode_portion(codec, dst + at, bytes(src) + encoded_bytes(codec, at), n); });
}

size_t sum_encoded(Codec codec, void* dst, std::span<const void* const> srcs, size_t count, double factor, float* error,
                   const Key& key) {
  const KeepSubnormals keep;
  size_t beyond = 0;
  in_portions(count, [&](size_t at, size_t n) {
    const size_t begin = encoded_bytes(codec, at);
    alignas(64) float sum[kPortion], next[kPortion];
    decode_portion(codec, sum, bytes(srcs[0]) + begin, n);
    for (size_t s = 1; s < srcs.size(); ++s) {
      decode_portion(codec, next, bytes(srcs[s]) + begin, n);
      for (size_t i = 0; i < n; ++i) sum[i] += next[i];
    }
    if (factor != 1.0) scale(sum, sum, n, DType::kFloat32, factor);
    beyond += encode_portion(codec, bytes(dst) + begin, sum, n, key, at);
    if (error == nullptr) return;
    decode_portion(codec, next, bytes(dst) + begin, n);
    const auto back = static_cast<float>(1.0 / factor);
    for (size_t i = 0; i < n; ++i) error[at + i] += finite_or(sum[i] - next[i], 0.0f) * back;
  });
  return beyond;
}

}  // namespace dcoll::kernels
