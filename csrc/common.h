// What the CPU ops share: fp32 arithmetic over fp32, bf16 and fp16 storage.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <bit>
#include <cmath>

namespace archon {

using at::Tensor;

// Elements below which another thread costs more than it brings.
constexpr int64_t kGrain = 1 << 14;

// fp64 is computed in fp64, everything else in fp32.
template <typename T>
using wide_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Rows that one thread takes at least, for rows of `width` elements.
inline int64_t row_grain(int64_t width) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width));
}

// A call inside a loop would keep it from being vectorised, and the compiler finds these too long to inline by itself.
#define ARCHON_INLINE [[gnu::always_inline]] inline

// exp to 1 ulp, 0 below the smallest normal number, in a form that the compiler vectorises.
ARCHON_INLINE float exp_of(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.f ? -87.f : (x > 88.f ? 88.f : x);
  const float n = (clamped * 1.44269504f + kRound) - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.f;
  const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < -87.f ? 0.f : p * power;
}

ARCHON_INLINE double exp_of(double x) { return std::exp(x); }

// Storage to fp32 and back, rounded to nearest even, in integer operations that the compiler vectorises: the conversions
// of c10 and of _Float16 stay scalar in gcc 12. NaN stays NaN.
ARCHON_INLINE float widen(c10::BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.x) << 16); }
ARCHON_INLINE float widen(c10::Half x) {
  const uint32_t size = x.x & 0x7fffu;
  // A subnormal is an integer number of 2^-24: the bits below those of 0.5 count just these.
  const float small = std::bit_cast<float>(0x3f000000u | size) - 0.5f;
  const uint32_t biased = (size << 13) + ((size < 0x7c00u ? 127u - 15u : 255u - 31u) << 23);
  const uint32_t bits = size < 0x0400u ? std::bit_cast<uint32_t>(small) : biased;
  return std::bit_cast<float>(bits | (static_cast<uint32_t>(x.x & 0x8000u) << 16));
}
ARCHON_INLINE float widen(float x) { return x; }
ARCHON_INLINE double widen(double x) { return x; }

ARCHON_INLINE void narrow(float x, c10::BFloat16& to) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.x = static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}
ARCHON_INLINE void narrow(float x, c10::Half& to) {
  const uint32_t bits = std::bit_cast<uint32_t>(x), size = bits & 0x7fffffffu;
  const uint32_t normal = (size + 0xfffu + ((size >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000u;  // as in widen
  const uint32_t finite = size < 0x38800000u ? small : normal;                                     // 2^-14
  const uint32_t large = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to.x = static_cast<uint16_t>((size < 0x47800000u ? finite : large) | ((bits >> 16) & 0x8000u));  // 2^16
}
ARCHON_INLINE void narrow(float x, float& to) { to = x; }
ARCHON_INLINE void narrow(double x, double& to) { to = x; }

}  // namespace archon

// Runs the lambda with `scalar_t` as the type of the storage.
#define ARCHON_DISPATCH(TYPE, NAME, ...)                                    \
  AT_DISPATCH_SWITCH(TYPE, NAME, AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__)   \
                     AT_DISPATCH_CASE(at::kDouble, __VA_ARGS__)              \
                     AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__)            \
                     AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))
