// Rows of tokens sorted by expert, and their weighted sum back in token order; see archon_kernels/permute.py.

#include <ATen/ops/zeros.h>

#include <cstring>

#include "common.h"

namespace archon {
namespace {

std::tuple<Tensor, Tensor, Tensor> sort_by_expert(const Tensor& indices_TK, int64_t num_experts, int64_t tile) {
  const Tensor indices = indices_TK.contiguous();
  const int64_t pairs = indices.numel();
  const int64_t rows = (pairs + num_experts * (tile - 1) + tile - 1) / tile * tile;
  Tensor source = at::empty({rows}, indices.options());
  Tensor position = at::empty({pairs}, indices.options());
  Tensor counts = at::empty({num_experts}, indices.options());
  const int64_t* experts = indices.const_data_ptr<int64_t>();
  int64_t* count = counts.mutable_data_ptr<int64_t>();
  std::fill(count, count + num_experts, 0);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    TORCH_CHECK(experts[pair] >= 0 && experts[pair] < num_experts, "expert ", experts[pair], " is not in [0, ",
                num_experts, ")");
    ++count[experts[pair]];
  }
  std::vector<int64_t> next(num_experts);
  int64_t start = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    next[expert] = start;
    count[expert] = (count[expert] + tile - 1) / tile * tile;
    start += count[expert];
  }
  int64_t* from = source.mutable_data_ptr<int64_t>();
  int64_t* to = position.mutable_data_ptr<int64_t>();
  if (tile > 1) std::fill(from, from + rows, -1);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    const int64_t row = next[experts[pair]]++;
    from[row] = pair;
    to[pair] = row;
  }
  return {source, position, counts};
}

Tensor permute(const Tensor& hidden_TD, const Tensor& source, int64_t top_k) {
  const Tensor hidden = hidden_TD.contiguous(), places = source.contiguous();
  const int64_t rows = source.numel(), tokens = hidden.size(0), width = hidden.size(1);
  Tensor out = at::empty({rows, width}, hidden.options());
  const int64_t bytes = width * hidden.element_size();
  const char* in = static_cast<const char*>(hidden.const_data_ptr());
  char* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t* from = places.const_data_ptr<int64_t>();
  at::parallel_for(0, rows, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (from[row] < 0) {
        std::memset(to + row * bytes, 0, bytes);
      } else {
        TORCH_CHECK(from[row] / top_k < tokens, "row ", row, " comes from pair ", from[row], ", but there are ", tokens,
                    " tokens with ", top_k, " choices each");
        std::memcpy(to + row * bytes, in + from[row] / top_k * bytes, bytes);
      }
    }
  });
  return out;
}

// Each token's sum over its K rows, each times its weight; all weights are 1 where `weights` is null.
template <typename scalar_t>
void sum_rows(const Tensor& rows_ND, const wide_t<scalar_t>* weights, const Tensor& position, scalar_t* out,
              int64_t tokens, int64_t top_k) {
  using acc_t = wide_t<scalar_t>;
  const int64_t count = rows_ND.size(0), width = rows_ND.size(1);
  TORCH_CHECK(position.numel() == tokens * top_k, position.numel(), " positions for ", tokens, " tokens with ", top_k,
              " choices each");
  const Tensor places = position.contiguous();
  const scalar_t* rows = rows_ND.const_data_ptr<scalar_t>();
  const int64_t* place = places.const_data_ptr<int64_t>();
  at::parallel_for(0, tokens, row_grain(width * top_k), [&](int64_t begin, int64_t end) {
    std::vector<acc_t> sum(width);
    for (int64_t token = begin; token < end; ++token) {
      std::fill(sum.begin(), sum.end(), acc_t(0));
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t pair = token * top_k + k, from = place[pair];
        TORCH_CHECK(from >= 0 && from < count, "pair ", pair, " lies in row ", from, " of ", count);
        const scalar_t* row = rows + from * width;
        const acc_t weight = weights == nullptr ? acc_t(1) : weights[pair];
        for (int64_t d = 0; d < width; ++d) sum[d] += weight * widen(row[d]);
      }
      scalar_t* to = out + token * width;
      for (int64_t d = 0; d < width; ++d) narrow(sum[d], to[d]);
    }
  });
}

Tensor permute_backward(const Tensor& grad_ND, const Tensor& position, int64_t top_k) {
  const Tensor grad = grad_ND.contiguous();
  TORCH_CHECK(top_k > 0, "tokens have at least 1 choice, not ", top_k);
  const int64_t tokens = position.numel() / top_k, width = grad.size(1);
  Tensor out = at::empty({tokens, width}, grad.options());
  ARCHON_DISPATCH(grad.scalar_type(), "permute_backward", [&] {
    sum_rows<scalar_t>(grad, nullptr, position, out.mutable_data_ptr<scalar_t>(), tokens, top_k);
  });
  return out;
}

Tensor combine(const Tensor& rows_ND, const Tensor& weights_TK, const Tensor& position) {
  const Tensor rows = rows_ND.contiguous();
  const int64_t tokens = weights_TK.size(0), top_k = weights_TK.size(1), width = rows.size(1);
  Tensor out = at::empty({tokens, width}, rows.options());
  ARCHON_DISPATCH(rows.scalar_type(), "combine", [&] {
    using acc_t = wide_t<scalar_t>;
    const Tensor weights = weights_TK.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    sum_rows<scalar_t>(rows, weights.const_data_ptr<acc_t>(), position, out.mutable_data_ptr<scalar_t>(), tokens,
                       top_k);
  });
  return out;
}

// Stores the gradient times the weight, and returns its product with the row.
template <typename scalar_t, typename acc_t>
acc_t scale_and_dot(const scalar_t* __restrict gradient, const scalar_t* __restrict row, acc_t weight,
                    scalar_t* __restrict to, int64_t width) {
  for (int64_t d = 0; d < width; ++d) narrow(widen(gradient[d]) * weight, to[d]);
  acc_t dot = 0;
#pragma omp simd reduction(+ : dot)
  for (int64_t d = 0; d < width; ++d) dot += widen(gradient[d]) * widen(row[d]);
  return dot;
}

std::tuple<Tensor, Tensor> combine_backward(const Tensor& grad_TD, const Tensor& rows_ND, const Tensor& weights_TK,
                                            const Tensor& source, const Tensor& /*position*/) {
  const Tensor grad = grad_TD.contiguous(), rows = rows_ND.contiguous(), places = source.contiguous();
  const int64_t pairs = weights_TK.numel(), top_k = weights_TK.size(1), width = rows.size(1);
  TORCH_CHECK(places.numel() == rows.size(0), places.numel(), " sources for ", rows.size(0), " rows");
  TORCH_CHECK(grad.size(0) == weights_TK.size(0) && grad.size(1) == width, "gradients ", grad.sizes(), " for ",
              weights_TK.size(0), " tokens of width ", width);
  Tensor grad_rows = at::empty(rows.sizes(), rows.options());
  Tensor grad_weights;
  ARCHON_DISPATCH(rows.scalar_type(), "combine_backward", [&] {
    using acc_t = wide_t<scalar_t>;
    const Tensor weights = weights_TK.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    grad_weights = at::zeros(weights.sizes(), weights.options());
    const scalar_t *g = grad.const_data_ptr<scalar_t>(), *x = rows.const_data_ptr<scalar_t>();
    const acc_t* w = weights.const_data_ptr<acc_t>();
    const int64_t* from = places.const_data_ptr<int64_t>();
    scalar_t* gx = grad_rows.mutable_data_ptr<scalar_t>();
    acc_t* gw = grad_weights.mutable_data_ptr<acc_t>();
    at::parallel_for(0, rows.size(0), row_grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t place = begin; place < end; ++place) {
        scalar_t* to = gx + place * width;
        const int64_t pair = from[place];
        if (pair < 0) {
          std::fill(to, to + width, scalar_t(0));
          continue;
        }
        TORCH_CHECK(pair < pairs, "row ", place, " comes from pair ", pair, " of ", pairs);
        const scalar_t *gradient = g + pair / top_k * width, *row = x + place * width;
        gw[pair] = scale_and_dot(gradient, row, w[pair], to, width);
      }
    });
  });
  return {grad_rows, grad_weights.to(weights_TK.scalar_type())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(archon_cpp, m) {
  m.def("sort_by_expert(Tensor indices_TK, int num_experts, int tile) -> (Tensor, Tensor, Tensor)");
  m.def("permute(Tensor hidden_TD, Tensor source, int top_k) -> Tensor");
  m.def("permute_backward(Tensor grad_ND, Tensor position, int top_k) -> Tensor");
  m.def("combine(Tensor rows_ND, Tensor weights_TK, Tensor position) -> Tensor");
  m.def(
      "combine_backward(Tensor grad_TD, Tensor rows_ND, Tensor weights_TK, Tensor source, Tensor position)"
      " -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(archon_cpp, CPU, m) {
  m.impl("sort_by_expert", sort_by_expert);
  m.impl("permute", permute);
  m.impl("permute_backward", permute_backward);
  m.impl("combine", combine);
  m.impl("combine_backward", combine_backward);
}

}  // namespace archon
