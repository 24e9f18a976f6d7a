// Matrix products of each expert's rows with its weight, and SwiGLU; see archon_kernels/grouped_mm.py.

#include <ATen/ops/mm.h>

#include "common.h"

namespace archon {
namespace {

// Calls `product(expert, first row, rows)` for each expert that has rows; returns the rows of all of them.
template <typename Product>
int64_t for_each_expert(const Tensor& counts_E, int64_t rows, const Product& product) {
  const Tensor counts = counts_E.contiguous();
  const int64_t* count = counts.const_data_ptr<int64_t>();
  int64_t start = 0;
  for (int64_t expert = 0; expert < counts.numel(); ++expert) {
    TORCH_CHECK(count[expert] >= 0 && start + count[expert] <= rows, "counts pass the ", rows, " rows at expert ",
                expert);
    if (count[expert] > 0) product(expert, start, count[expert]);
    start += count[expert];
  }
  return start;
}

void zero_rows_from(Tensor& out, int64_t first) {
  if (first < out.size(0)) out.narrow(0, first, out.size(0) - first).zero_();
}

// rows @ weight[e] with weight `[E, in, out]`, whatever its strides.
Tensor product_per_expert(const Tensor& rows_NI, const Tensor& weight_EIO, const Tensor& counts_E) {
  Tensor out = at::empty({rows_NI.size(0), weight_EIO.size(2)}, rows_NI.options());
  const int64_t used = for_each_expert(counts_E, rows_NI.size(0), [&](int64_t expert, int64_t start, int64_t count) {
    Tensor part = out.narrow(0, start, count);
    at::mm_out(part, rows_NI.narrow(0, start, count), weight_EIO.select(0, expert));
  });
  zero_rows_from(out, used);
  return out;
}

// silu(gate) * up over rows that hold gate, then up.
template <typename scalar_t>
void swiglu_rows(const scalar_t* product, scalar_t* out, int64_t rows, int64_t inner) {
  using acc_t = wide_t<scalar_t>;
  at::parallel_for(0, rows, row_grain(inner), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const scalar_t *gate = product + row * 2 * inner, *up = gate + inner;
      scalar_t* to = out + row * inner;
      for (int64_t f = 0; f < inner; ++f) {
        const acc_t g = gate[f], u = up[f];
        to[f] = static_cast<scalar_t>(g / (1 + exp_of(-g)) * u);
      }
    }
  });
}

std::tuple<Tensor, Tensor> grouped_swiglu(const Tensor& rows_ND, const Tensor& gate_up_EFD, const Tensor& counts_E) {
  const int64_t rows = rows_ND.size(0), inner = gate_up_EFD.size(1) / 2;
  Tensor product = at::empty({rows, 2 * inner}, rows_ND.options());
  Tensor out = at::empty({rows, inner}, rows_ND.options());
  const int64_t used = for_each_expert(counts_E, rows, [&](int64_t expert, int64_t start, int64_t count) {
    Tensor part = product.narrow(0, start, count);
    at::mm_out(part, rows_ND.narrow(0, start, count), gate_up_EFD.select(0, expert).t());
    ARCHON_DISPATCH(rows_ND.scalar_type(), "grouped_swiglu", [&] {  // while the product is in the cache
      swiglu_rows(part.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>() + start * inner, count, inner);
    });
  });
  zero_rows_from(product, used);
  zero_rows_from(out, used);
  return {out, product};
}

// Two loops: one that stores both took nearly three times as long in bf16.
template <typename scalar_t>
void swiglu_backward_row(const scalar_t* __restrict gate, const scalar_t* __restrict up,
                         const scalar_t* __restrict pull, scalar_t* __restrict grad_gate,
                         scalar_t* __restrict grad_up, int64_t inner) {
  using acc_t = wide_t<scalar_t>;
  for (int64_t f = 0; f < inner; ++f) {
    const acc_t g = gate[f], u = up[f], p = pull[f], sigmoid = 1 / (1 + exp_of(-g));
    grad_gate[f] = static_cast<scalar_t>(p * u * sigmoid * (1 + g * (1 - sigmoid)));
  }
  for (int64_t f = 0; f < inner; ++f) {
    const acc_t g = gate[f], p = pull[f];
    grad_up[f] = static_cast<scalar_t>(p * g / (1 + exp_of(-g)));
  }
}

Tensor swiglu_backward(const Tensor& grad_NF, const Tensor& product_NF) {
  const Tensor grad = grad_NF.contiguous(), product = product_NF.contiguous();
  const int64_t rows = grad.size(0), inner = grad.size(1);
  TORCH_CHECK(product.size(0) == rows && product.size(1) == 2 * inner, "gradients ", grad.sizes(), " for products ",
              product.sizes());
  Tensor out = at::empty(product.sizes(), product.options());
  ARCHON_DISPATCH(product.scalar_type(), "swiglu_backward", [&] {
    const scalar_t *from = product.const_data_ptr<scalar_t>(), *gradient = grad.const_data_ptr<scalar_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, rows, row_grain(inner), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const scalar_t *gate = from + row * 2 * inner, *up = gate + inner, *pull = gradient + row * inner;
        scalar_t *grad_gate = to + row * 2 * inner, *grad_up = grad_gate + inner;
        swiglu_backward_row(gate, up, pull, grad_gate, grad_up, inner);
      }
    });
  });
  return out;
}

Tensor grouped_linear(const Tensor& rows_ND, const Tensor& weight_EFD, const Tensor& counts_E) {
  return product_per_expert(rows_ND, weight_EFD.transpose(1, 2), counts_E);
}

Tensor grouped_linear_grad_rows(const Tensor& grad_NF, const Tensor& weight_EFD, const Tensor& counts_E) {
  return product_per_expert(grad_NF, weight_EFD, counts_E);
}

Tensor grouped_linear_grad_weight(const Tensor& grad_NF, const Tensor& rows_ND, const Tensor& counts_E) {
  Tensor out = at::empty({counts_E.size(0), grad_NF.size(1), rows_ND.size(1)}, rows_ND.options());
  int64_t next = 0;
  const auto zero_until = [&](int64_t expert) {
    if (next < expert) out.narrow(0, next, expert - next).zero_();
    next = expert + 1;
  };
  for_each_expert(counts_E, rows_ND.size(0), [&](int64_t expert, int64_t start, int64_t count) {
    zero_until(expert);
    Tensor part = out.select(0, expert);
    at::mm_out(part, grad_NF.narrow(0, start, count).t(), rows_ND.narrow(0, start, count));
  });
  zero_until(counts_E.size(0));
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(archon_cpp, m) {
  m.def("grouped_linear(Tensor rows_ND, Tensor weight_EFD, Tensor counts_E) -> Tensor");
  m.def("grouped_linear_grad_rows(Tensor grad_NF, Tensor weight_EFD, Tensor counts_E) -> Tensor");
  m.def("grouped_linear_grad_weight(Tensor grad_NF, Tensor rows_ND, Tensor counts_E) -> Tensor");
  m.def("grouped_swiglu(Tensor rows_ND, Tensor gate_up_EFD, Tensor counts_E) -> (Tensor, Tensor)");
  m.def("swiglu_backward(Tensor grad_NF, Tensor product_NF) -> Tensor");
}

TORCH_LIBRARY_IMPL(archon_cpp, CPU, m) {
  m.impl("grouped_linear", grouped_linear);
  m.impl("grouped_linear_grad_rows", grouped_linear_grad_rows);
  m.impl("grouped_linear_grad_weight", grouped_linear_grad_weight);
  m.impl("grouped_swiglu", grouped_swiglu);
  m.impl("swiglu_backward", swiglu_backward);
}

}  // namespace archon
