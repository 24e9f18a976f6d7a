// The passes over a tile of logits of the LM head; see archon_kernels/logprob_tiles.py, whose references state them.

#include <cmath>
#include <limits>

#include "common.h"

namespace archon {
namespace {

// Scores handled at a time: small enough that every step over them stays in the first cache.
constexpr int64_t kBlock = 512;

// tanh to 3 ulp or so: a series where 1 - 2 / (exp(2x) + 1) would cancel.
ARCHON_INLINE float tanh_of(float x) {
  const float size = std::abs(x) > 20.f ? 20.f : std::abs(x), y = size * size;
  const float large = 1.f - 2.f / (exp_of(2.f * size) + 1.f);
  const float small =
      size + size * y * (-0.333333333f + y * (0.133333333f + y * (-0.0539682540f + y * (0.0218694885f - y * 0.00886323553f))));
  const float value = size < 0.35f ? small : large;
  return x != x ? x : (x < 0.f ? -value : value);
}

ARCHON_INLINE double tanh_of(double x) { return std::tanh(x); }

// What turns the logits of a tile into scores.
template <typename acc_t>
struct Scores {
  const acc_t* bias;
  const acc_t* temperature;
  acc_t softcap;

  acc_t inverse_temperature(int64_t row) const { return temperature == nullptr ? acc_t(1) : acc_t(1) / temperature[row]; }

  // logits + bias
  template <typename scalar_t>
  void read(const scalar_t* logits, int64_t column, int64_t count, acc_t* to) const {
    for (int64_t i = 0; i < count; ++i) to[i] = widen(logits[column + i]);
    if (bias != nullptr) {
      for (int64_t i = 0; i < count; ++i) to[i] += bias[column + i];
    }
  }

  // tanh((logits + bias) / softcap) where there is a cap
  void squash(acc_t* x, int64_t count) const {
    if (softcap == acc_t(0)) return;
    const acc_t inverse = acc_t(1) / softcap;
    for (int64_t i = 0; i < count; ++i) x[i] = tanh_of(x[i] * inverse);
  }

  // what brings the outcome of squash to a score
  acc_t scale(int64_t row) const { return inverse_temperature(row) * (softcap == acc_t(0) ? acc_t(1) : softcap); }
};

template <typename acc_t>
const acc_t* pointer(const std::optional<Tensor>& x) {
  return x.has_value() ? x->const_data_ptr<acc_t>() : nullptr;
}

template <typename scalar_t, typename acc_t>
void statistics_of_row(const scalar_t* logits, int64_t columns, const Scores<acc_t>& scores, int64_t row,
                       int64_t target, bool with_entropy, acc_t* running) {
  acc_t x[kBlock];
  acc_t best = -std::numeric_limits<acc_t>::infinity();
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t count = std::min(kBlock, columns - start);
    scores.read(logits, start, count, x);
#pragma omp simd reduction(max : best)
    for (int64_t i = 0; i < count; ++i) best = x[i] > best ? x[i] : best;
  }
  const acc_t scale = scores.scale(row);
  scores.squash(&best, 1);  // it is monotone, and so is the division by a temperature
  const acc_t peak = std::max(running[0], best * scale);
  acc_t total = 0, weighted = 0;
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t count = std::min(kBlock, columns - start);
    scores.read(logits, start, count, x);
    scores.squash(x, count);
    if (target >= start && target < start + count) running[2] = x[target - start] * scale;
    acc_t block_total = 0, block_weighted = 0;  // sums of sums round less than one long sum
    if (with_entropy) {
#pragma omp simd reduction(+ : block_total, block_weighted)
      for (int64_t i = 0; i < count; ++i) {
        const acc_t below = x[i] * scale - peak, e = exp_of(below);
        block_total += e;
        block_weighted += e * below;
      }
    } else {
#pragma omp simd reduction(+ : block_total)
      for (int64_t i = 0; i < count; ++i) block_total += exp_of(x[i] * scale - peak);
    }
    total += block_total;
    weighted += block_weighted;
  }
  if (running[1] != acc_t(0)) {
    const acc_t below = running[0] - peak, shrink = std::exp(below);
    weighted += (running[3] + running[1] * below) * shrink;
    total += running[1] * shrink;
  }
  running[0] = peak;
  running[1] = total;
  running[3] = weighted;
}

void logprob_statistics(const Tensor& logits_MC, const std::optional<Tensor>& bias_C,
                        const std::optional<Tensor>& temperature, double softcap, const Tensor& target_M,
                        bool with_entropy, const Tensor& running_M4) {
  TORCH_CHECK(logits_MC.is_contiguous() && running_M4.is_contiguous(), "tiles and statistics must be contiguous");
  const int64_t rows = logits_MC.size(0), columns = logits_MC.size(1);
  const Tensor targets = target_M.contiguous();
  ARCHON_DISPATCH(logits_MC.scalar_type(), "logprob_statistics", [&] {
    using acc_t = wide_t<scalar_t>;
    const Scores<acc_t> scores{pointer<acc_t>(bias_C), pointer<acc_t>(temperature), static_cast<acc_t>(softcap)};
    const scalar_t* logits = logits_MC.const_data_ptr<scalar_t>();
    const int64_t* target = targets.const_data_ptr<int64_t>();
    acc_t* running = running_M4.mutable_data_ptr<acc_t>();
    at::parallel_for(0, rows, row_grain(columns), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        statistics_of_row(logits + row * columns, columns, scores, row, target[row], with_entropy, running + row * 4);
      }
    });
  });
}

// pull, pull of the entropy and entropy of a row, and the log-sum-exp of its scores.
template <typename acc_t>
struct Pull {
  acc_t pull, pull_entropy, entropy, logsumexp;
};

// Turns what squash left of a block of logits into their gradient, without the one-hot terms.
template <typename acc_t>
void gradient_of_block(acc_t* x, int64_t count, const Pull<acc_t>& row, acc_t scale, acc_t inverse_temperature,
                       bool capped) {
  const acc_t pull = -row.pull * inverse_temperature, pull_entropy = -row.pull_entropy * inverse_temperature;
  const acc_t shift = row.entropy, logsumexp = row.logsumexp;
  if (pull_entropy != acc_t(0)) {
    for (int64_t i = 0; i < count; ++i) {
      const acc_t logp = x[i] * scale - logsumexp, slope = capped ? acc_t(1) - x[i] * x[i] : acc_t(1);
      x[i] = exp_of(logp) * (pull + pull_entropy * (logp + shift)) * slope;
    }
  } else if (capped) {
    for (int64_t i = 0; i < count; ++i) {
      x[i] = exp_of(x[i] * scale - logsumexp) * pull * (acc_t(1) - x[i] * x[i]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) x[i] = exp_of(x[i] * scale - logsumexp) * pull;
  }
}

template <typename scalar_t, typename acc_t>
void gradient_of_row(const scalar_t* logits, int64_t columns, const Scores<acc_t>& scores, int64_t row,
                     const Pull<acc_t>& pull, const int64_t* chosen, const acc_t* pull_chosen, int64_t choices,
                     acc_t* at_chosen, scalar_t* out) {
  const acc_t scale = scores.scale(row), inverse = scores.inverse_temperature(row);
  const bool capped = scores.softcap != acc_t(0);
  // The one-hot terms nearly cancel p where it is close to 1, so both are added before the sum is rounded, and before
  // the logits are overwritten.
  for (int64_t n = 0; n < choices; ++n) {
    if (chosen[n] < 0 || chosen[n] >= columns) continue;
    acc_t x;
    scores.read(logits, chosen[n], 1, &x);
    scores.squash(&x, 1);
    const acc_t slope = capped ? acc_t(1) - x * x : acc_t(1);
    acc_t sum = 0;
    for (int64_t other = 0; other < choices; ++other) sum += chosen[other] == chosen[n] ? pull_chosen[other] : acc_t(0);
    gradient_of_block(&x, 1, pull, scale, inverse, capped);
    at_chosen[n] = x + sum * inverse * slope;
  }
  acc_t x[kBlock];
  for (int64_t start = 0; start < columns; start += kBlock) {
    const int64_t count = std::min(kBlock, columns - start);
    scores.read(logits, start, count, x);
    scores.squash(x, count);
    gradient_of_block(x, count, pull, scale, inverse, capped);
    for (int64_t i = 0; i < count; ++i) narrow(x[i], out[start + i]);
  }
  for (int64_t n = 0; n < choices; ++n) {
    if (chosen[n] >= 0 && chosen[n] < columns) narrow(at_chosen[n], out[chosen[n]]);
  }
}

void logprob_gradient(const Tensor& logits_MC, const std::optional<Tensor>& bias_C,
                      const std::optional<Tensor>& temperature, double softcap, const Tensor& logsumexp_M,
                      const Tensor& pull_M3, const Tensor& chosen_MN, const Tensor& pull_chosen_MN,
                      const Tensor& out_MC) {
  TORCH_CHECK(logits_MC.is_contiguous() && out_MC.is_contiguous(), "tiles must be contiguous");
  const int64_t rows = logits_MC.size(0), columns = logits_MC.size(1), choices = chosen_MN.size(1);
  const Tensor logsumexps = logsumexp_M.contiguous(), pulls = pull_M3.contiguous(), chosen_ids = chosen_MN.contiguous(),
               chosen_pulls = pull_chosen_MN.contiguous();
  ARCHON_DISPATCH(logits_MC.scalar_type(), "logprob_gradient", [&] {
    using acc_t = wide_t<scalar_t>;
    const Scores<acc_t> scores{pointer<acc_t>(bias_C), pointer<acc_t>(temperature), static_cast<acc_t>(softcap)};
    const scalar_t* logits = logits_MC.const_data_ptr<scalar_t>();
    const acc_t *logsumexp = logsumexps.const_data_ptr<acc_t>(), *pull = pulls.const_data_ptr<acc_t>();
    const int64_t* chosen = chosen_ids.const_data_ptr<int64_t>();
    const acc_t* pull_chosen = chosen_pulls.const_data_ptr<acc_t>();
    scalar_t* out = out_MC.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, row_grain(columns), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> at_chosen(choices);
      for (int64_t row = begin; row < end; ++row) {
        const Pull<acc_t> of_row{pull[row * 3], pull[row * 3 + 1], pull[row * 3 + 2], logsumexp[row]};
        gradient_of_row(logits + row * columns, columns, scores, row, of_row, chosen + row * choices,
                        pull_chosen + row * choices, choices, at_chosen.data(), out + row * columns);
      }
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(archon_cpp, m) {
  m.def(
      "logprob_statistics(Tensor logits_MC, Tensor? bias_C, Tensor? temperature, float softcap, Tensor target_M, "
      "bool with_entropy, Tensor(a!) running_M4) -> ()");
  m.def(
      "logprob_gradient(Tensor logits_MC, Tensor? bias_C, Tensor? temperature, float softcap, Tensor logsumexp_M, "
      "Tensor pull_M3, Tensor chosen_MN, Tensor pull_chosen_MN, Tensor(a!) out_MC) -> ()");
}

TORCH_LIBRARY_IMPL(archon_cpp, CPU, m) {
  m.impl("logprob_statistics", logprob_statistics);
  m.impl("logprob_gradient", logprob_gradient);
}

}  // namespace archon
