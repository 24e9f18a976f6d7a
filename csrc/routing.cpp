// Top-k gate of a mixture of experts, and how many tokens each expert gets; see archon_kernels/routing.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "common.h"

namespace archon {
namespace {

constexpr int64_t kLanes = 16;  // rows are padded to whole vectors, so that equal logits get equal scores
constexpr double kScoreBound = 1e38, kSigmoidEpsilon = 1e-20;

inline int64_t padded(int64_t width) { return (width + kLanes - 1) / kLanes * kLanes; }

// Scores of one row of logits; `scores` has room for whole vectors.
template <typename scalar_t, typename acc_t>
void score_row(const scalar_t* logits, acc_t* scores, int64_t experts, bool sigmoid) {
  const int64_t width = padded(experts);
  for (int64_t e = 0; e < experts; ++e) scores[e] = widen(logits[e]);
  if (sigmoid) {
    std::fill(scores + experts, scores + width, acc_t(0));
    for (int64_t e = 0; e < width; ++e) scores[e] = acc_t(1) / (acc_t(1) + exp_of(-scores[e]));
    return;
  }
  std::fill(scores + experts, scores + width, -std::numeric_limits<acc_t>::infinity());
  acc_t top = scores[0], sum = 0;
#pragma omp simd reduction(max : top)
  for (int64_t e = 1; e < experts; ++e) top = scores[e] > top ? scores[e] : top;
  for (int64_t e = 0; e < width; ++e) scores[e] = exp_of(scores[e] - top);
#pragma omp simd reduction(+ : sum)
  for (int64_t e = 0; e < width; ++e) sum += scores[e];
  for (int64_t e = 0; e < width; ++e) scores[e] = scores[e] / sum;
}

// Indices of the k largest values, which must be above -inf, the first of equal ones first; these values
// become -inf. k passes of vector operations: keeping a sorted list in one pass costs more in mispredicted branches.
template <typename acc_t>
void take_largest(acc_t* values, int64_t width, int64_t k, int64_t* place) {
  const int32_t count = static_cast<int32_t>(width);
  for (int64_t taken = 0; taken < k; ++taken) {
    acc_t top = values[0];
#pragma omp simd reduction(max : top)
    for (int32_t i = 0; i < count; ++i) top = values[i] > top ? values[i] : top;
    int32_t first = count;
#pragma omp simd reduction(min : first)
    for (int32_t i = 0; i < count; ++i) first = values[i] == top && i < first ? i : first;
    values[first] = -std::numeric_limits<acc_t>::infinity();
    place[taken] = first;
  }
}

struct Groups {
  int64_t count, per_token, score_top, size;
};

// Sets the scores of the groups that a token does not use to -inf.
template <typename acc_t>
void close_groups(acc_t* selection, const Groups& groups, std::vector<acc_t>& scores, std::vector<int64_t>& place) {
  const acc_t lowest = -std::numeric_limits<acc_t>::infinity();
  for (int64_t g = 0; g < groups.count; ++g) {
    acc_t first = lowest, second = lowest;
    for (int64_t e = g * groups.size; e < (g + 1) * groups.size; ++e) {
      second = std::max(second, std::min(first, selection[e]));
      first = std::max(first, selection[e]);
    }
    scores[g] = groups.score_top == 2 ? first + second : first;
  }
  std::fill(scores.begin() + groups.count, scores.end(), lowest);
  take_largest(scores.data(), static_cast<int64_t>(scores.size()), groups.per_token, place.data());
  for (int64_t g = 0; g < groups.count; ++g) {
    if (scores[g] == lowest) continue;  // taken
    std::fill(selection + g * groups.size, selection + (g + 1) * groups.size, lowest);
  }
}

std::tuple<Tensor, Tensor> topk_gate(const Tensor& logits_TE, int64_t top_k, bool sigmoid, bool renormalize,
                                     double scale, int64_t n_groups, int64_t groups_per_token, int64_t group_score_top,
                                     const std::optional<Tensor>& bias_E, const std::optional<Tensor>& recorded_TK) {
  const Tensor logits = logits_TE.contiguous();
  const int64_t tokens = logits.size(0), experts = logits.size(1);
  const Groups groups{n_groups, groups_per_token, group_score_top, experts / n_groups};
  TORCH_CHECK(!bias_E || bias_E->numel() == experts, "a bias of ", bias_E ? bias_E->numel() : 0, " for ", experts,
              " experts");
  TORCH_CHECK(!recorded_TK || recorded_TK->numel() == tokens * top_k, recorded_TK ? recorded_TK->numel() : 0,
              " recorded choices for ", tokens, " tokens with ", top_k, " each");
  const Tensor recorded = recorded_TK ? recorded_TK->contiguous() : Tensor();
  const int64_t* given = recorded_TK ? recorded.const_data_ptr<int64_t>() : nullptr;
  Tensor indices = at::empty({tokens, top_k}, logits.options().dtype(at::kLong));
  Tensor weights;
  int64_t* index = indices.mutable_data_ptr<int64_t>();
  ARCHON_DISPATCH(logits.scalar_type(), "topk_gate", [&] {
    using acc_t = wide_t<scalar_t>;
    constexpr at::ScalarType acc_type = c10::CppTypeToScalarType<acc_t>::value;
    const Tensor biases = bias_E ? bias_E->to(acc_type).contiguous() : Tensor();
    const acc_t* bias = bias_E ? biases.const_data_ptr<acc_t>() : nullptr;
    weights = at::empty({tokens, top_k}, logits.options().dtype(acc_type));
    const scalar_t* x = logits.const_data_ptr<scalar_t>();
    acc_t* weight = weights.mutable_data_ptr<acc_t>();
    const acc_t bound = static_cast<acc_t>(kScoreBound), epsilon = sigmoid ? static_cast<acc_t>(kSigmoidEpsilon) : 0;
    at::parallel_for(0, tokens, row_grain(experts * 4), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> scores(padded(experts)), selection(padded(experts)), group_scores(padded(n_groups));
      std::vector<int64_t> place(groups_per_token);
      for (int64_t token = begin; token < end; ++token) {
        score_row(x + token * experts, scores.data(), experts, sigmoid);
        for (int64_t e = 0; e < experts; ++e) {
          const acc_t score = bias == nullptr ? scores[e] : scores[e] + bias[e];
          selection[e] = score > -bound ? (score < bound ? score : bound) : -bound;  // NaN is the lowest
        }
        std::fill(selection.begin() + experts, selection.end(), -std::numeric_limits<acc_t>::infinity());
        if (groups.per_token < groups.count) close_groups(selection.data(), groups, group_scores, place);
        int64_t* chosen = index + token * top_k;
        take_largest(selection.data(), padded(experts), top_k, chosen);
        acc_t* out = weight + token * top_k;
        acc_t sum = 0;
        for (int64_t k = 0; k < top_k; ++k) {
          if (given != nullptr && given[token * top_k + k] >= 0) chosen[k] = given[token * top_k + k];
          TORCH_CHECK(chosen[k] < experts, "recorded expert ", chosen[k], " is not in [0, ", experts, ")");
          out[k] = scores[chosen[k]];
          sum += out[k];
        }
        for (int64_t k = 0; k < top_k; ++k) {
          out[k] = (renormalize ? out[k] / (sum + epsilon) : out[k]) * static_cast<acc_t>(scale);
        }
      }
    });
  });
  return {weights, indices};
}

Tensor topk_gate_backward(const Tensor& grad_TK, const Tensor& logits_TE, const Tensor& indices_TK, bool sigmoid,
                          bool renormalize, double scale) {
  const Tensor logits = logits_TE.contiguous(), indices = indices_TK.contiguous();
  const int64_t tokens = logits.size(0), experts = logits.size(1), top_k = indices.size(1);
  TORCH_CHECK(indices.size(0) == tokens && grad_TK.sizes() == indices.sizes(), "gradients ", grad_TK.sizes(),
              " of choices ", indices.sizes(), " of ", tokens, " tokens");
  Tensor out = at::empty({tokens, experts}, logits.options());
  const int64_t* index = indices.const_data_ptr<int64_t>();
  ARCHON_DISPATCH(logits.scalar_type(), "topk_gate_backward", [&] {
    using acc_t = wide_t<scalar_t>;
    const Tensor grads = grad_TK.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    const scalar_t* x = logits.const_data_ptr<scalar_t>();
    const acc_t* grad = grads.const_data_ptr<acc_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const acc_t epsilon = sigmoid ? static_cast<acc_t>(kSigmoidEpsilon) : 0;
    at::parallel_for(0, tokens, row_grain(experts * 4), [&](int64_t begin, int64_t end) {
      std::vector<acc_t> scores(padded(experts)), row(experts), chosen_grad(top_k);
      for (int64_t token = begin; token < end; ++token) {
        score_row(x + token * experts, scores.data(), experts, sigmoid);
        const int64_t* chosen = index + token * top_k;
        const acc_t* g = grad + token * top_k;
        acc_t sum = 0, dot = 0;
        for (int64_t k = 0; k < top_k; ++k) {
          TORCH_CHECK(chosen[k] >= 0 && chosen[k] < experts, "expert ", chosen[k], " is not in [0, ", experts, ")");
          sum += scores[chosen[k]];
          dot += g[k] * scores[chosen[k]];
        }
        sum += epsilon;
        acc_t pull = 0;  // what softmax takes from every expert alike
        for (int64_t k = 0; k < top_k; ++k) {
          chosen_grad[k] = static_cast<acc_t>(scale) * (renormalize ? (g[k] - dot / sum) / sum : g[k]);
          pull += chosen_grad[k] * scores[chosen[k]];
        }
        for (int64_t e = 0; e < experts; ++e) row[e] = sigmoid ? acc_t(0) : -pull * scores[e];
        for (int64_t k = 0; k < top_k; ++k) {
          const acc_t score = scores[chosen[k]];
          row[chosen[k]] += chosen_grad[k] * score * (sigmoid ? 1 - score : acc_t(1));
        }
        for (int64_t e = 0; e < experts; ++e) narrow(row[e], to[token * experts + e]);
      }
    });
  });
  return out;
}

Tensor count_experts(const Tensor& indices_TK, int64_t num_experts, const std::optional<Tensor>& mask_T) {
  const Tensor indices = indices_TK.contiguous();
  TORCH_CHECK(!mask_T || mask_T->numel() == indices_TK.size(0), "a mask of ", mask_T ? mask_T->numel() : 0, " for ",
              indices_TK.size(0), " tokens");
  const Tensor mask = mask_T ? mask_T->contiguous() : Tensor();
  const bool* counted = mask_T ? mask.const_data_ptr<bool>() : nullptr;
  Tensor counts = at::empty({num_experts}, indices.options());
  const int64_t *index = indices.const_data_ptr<int64_t>(), top_k = indices.size(1);
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  std::fill(count, count + num_experts, 0);
  for (int64_t pair = 0; pair < indices.numel(); ++pair) {
    TORCH_CHECK(index[pair] >= 0 && index[pair] < num_experts, "expert ", index[pair], " is not in [0, ", num_experts,
                ")");
    count[index[pair]] += counted == nullptr || counted[pair / top_k];
  }
  return counts;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(archon_cpp, m) {
  m.def(
      "topk_gate(Tensor logits_TE, int top_k, bool sigmoid, bool renormalize, float scale, int n_groups, "
      "int groups_per_token, int group_score_top, Tensor? bias_E, Tensor? recorded_TK) -> (Tensor, Tensor)");
  m.def(
      "topk_gate_backward(Tensor grad_TK, Tensor logits_TE, Tensor indices_TK, bool sigmoid, bool renormalize, "
      "float scale) -> Tensor");
  m.def("count_experts(Tensor indices_TK, int num_experts, Tensor? mask_T) -> Tensor");
}

TORCH_LIBRARY_IMPL(archon_cpp, CPU, m) {
  m.impl("topk_gate", topk_gate);
  m.impl("topk_gate_backward", topk_gate_backward);
  m.impl("count_experts", count_experts);
}

}  // namespace archon
