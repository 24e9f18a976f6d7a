// RMS normalisation and rotary positions of rows; see archon_kernels/norm.py and archon_kernels/rope.py.

#include <vector>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "common.h"

namespace archon {
namespace {

// Sums of a row, in the order that its vectors have.
template <typename scalar_t, typename acc_t>
ARCHON_INLINE acc_t sum_of_squares(const scalar_t* x, int64_t width) {
  acc_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < width; ++d) {
    const acc_t value = widen(x[d]);
    sum += value * value;
  }
  return sum;
}

template <typename scalar_t, typename acc_t>
void normalise(const scalar_t* x, const scalar_t* weight, scalar_t* out, acc_t* scale, int64_t rows, int64_t width,
               double eps) {
  at::parallel_for(0, rows, row_grain(width), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const scalar_t* from = x + row * width;
      scalar_t* to = out + row * width;
      const acc_t mean = sum_of_squares<scalar_t, acc_t>(from, width) / static_cast<acc_t>(width);
      const acc_t factor = acc_t(1) / std::sqrt(mean + static_cast<acc_t>(eps));
      scale[row] = factor;
      for (int64_t d = 0; d < width; ++d) narrow(widen(from[d]) * factor * widen(weight[d]), to[d]);
    }
  });
}

// With n = x * scale: dx = scale * (g w - n mean(g w n)), dw = sum over rows of g n.
template <typename scalar_t, typename acc_t>
void normalise_backward(const scalar_t* grad, const scalar_t* x, const scalar_t* weight, const acc_t* scale,
                        scalar_t* grad_x, acc_t* grad_weight, int64_t begin, int64_t end, int64_t width) {
  for (int64_t row = begin; row < end; ++row) {
    const scalar_t *g = grad + row * width, *from = x + row * width;
    scalar_t* to = grad_x + row * width;
    const acc_t factor = scale[row];
    acc_t dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t d = 0; d < width; ++d) {
      const acc_t pull = widen(g[d]), normal = widen(from[d]) * factor;
      grad_weight[d] += pull * normal;
      dot += pull * widen(weight[d]) * normal;
    }
    const acc_t shared = dot / static_cast<acc_t>(width);
    for (int64_t d = 0; d < width; ++d) {
      narrow(factor * (widen(g[d]) * widen(weight[d]) - widen(from[d]) * factor * shared), to[d]);
    }
  }
}

void check_weight(const Tensor& x_ND, const Tensor& weight_D) {
  TORCH_CHECK(weight_D.numel() == x_ND.size(1), "a weight of ", weight_D.numel(), " for rows of ", x_ND.size(1));
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor& x_ND, const Tensor& weight_D, double eps) {
  check_weight(x_ND, weight_D);
  const Tensor x = x_ND.contiguous(), weight = weight_D.to(x_ND.scalar_type()).contiguous();
  const int64_t rows = x.size(0), width = x.size(1);
  Tensor out = at::empty_like(x), scale;
  ARCHON_DISPATCH(x.scalar_type(), "rms_norm", [&] {
    using acc_t = wide_t<scalar_t>;
    scale = at::empty({rows}, x.options().dtype(c10::CppTypeToScalarType<acc_t>::value));
    normalise<scalar_t, acc_t>(x.const_data_ptr<scalar_t>(), weight.const_data_ptr<scalar_t>(),
                               out.mutable_data_ptr<scalar_t>(), scale.mutable_data_ptr<acc_t>(), rows, width, eps);
  });
  return {out, scale};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_ND, const Tensor& x_ND, const Tensor& weight_D,
                                             const Tensor& scale_N) {
  check_weight(x_ND, weight_D);
  TORCH_CHECK(grad_ND.sizes() == x_ND.sizes() && scale_N.numel() == x_ND.size(0), "a gradient ", grad_ND.sizes(),
              " and ", scale_N.numel(), " scales for rows ", x_ND.sizes());
  const Tensor grad = grad_ND.contiguous(), x = x_ND.contiguous();
  const Tensor weight = weight_D.to(x_ND.scalar_type()).contiguous();
  const int64_t rows = x.size(0), width = x.size(1);
  // Each part of the rows has sums of its own, and there are as many parts at any time: equal inputs give equal bits.
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(at::get_num_threads(), rows * width / kGrain));
  Tensor grad_x = at::empty_like(x), sums = at::zeros({parts, width}, scale_N.options());
  ARCHON_DISPATCH(x.scalar_type(), "rms_norm_backward", [&] {
    using acc_t = wide_t<scalar_t>;
    at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        normalise_backward<scalar_t, acc_t>(
            grad.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), weight.const_data_ptr<scalar_t>(),
            scale_N.const_data_ptr<acc_t>(), grad_x.mutable_data_ptr<scalar_t>(),
            sums.mutable_data_ptr<acc_t>() + part * width, part * rows / parts, (part + 1) * rows / parts, width);
      }
    });
  });
  return {grad_x, sums.sum(0).to(weight_D.scalar_type())};
}

template <typename scalar_t, typename acc_t>
ARCHON_INLINE void turn_head(const scalar_t* x, const acc_t* cos, const acc_t* sin, scalar_t* out, int64_t half,
                             acc_t sign) {
  for (int64_t i = 0; i < half; ++i) {
    const acc_t low = widen(x[i]), high = widen(x[i + half]);
    narrow(low * cos[i] + high * (sign * sin[i]), out[i]);
    narrow(high * cos[i + half] + low * (sign * sin[i + half]), out[i + half]);
  }
}

Tensor rotate(const Tensor& x_THd, const Tensor& cos_Td, const Tensor& sin_Td, bool inverse) {
  const Tensor x = x_THd.stride(2) == 1 ? x_THd : x_THd.contiguous();
  const int64_t tokens = x.size(0), heads = x.size(1), size = x.size(2);
  TORCH_CHECK(size % 2 == 0, "heads have pairs of numbers to rotate, not ", size);
  TORCH_CHECK(cos_Td.numel() == tokens * size && sin_Td.numel() == tokens * size, "tables of ", cos_Td.numel(), " and ",
              sin_Td.numel(), " numbers for ", tokens, " tokens of ", size, ": pass one row for each token");
  Tensor out = at::empty({tokens, heads, size}, x.options());
  ARCHON_DISPATCH(x.scalar_type(), "rotate", [&] {
    using acc_t = wide_t<scalar_t>;
    const Tensor cos = cos_Td.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    const Tensor sin = sin_Td.to(c10::CppTypeToScalarType<acc_t>::value).contiguous();
    const scalar_t* from = x.const_data_ptr<scalar_t>();
    const acc_t *c = cos.const_data_ptr<acc_t>(), *s = sin.const_data_ptr<acc_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, tokens, row_grain(heads * size), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        for (int64_t head = 0; head < heads; ++head) {
          turn_head<scalar_t, acc_t>(from + token * x.stride(0) + head * x.stride(1), c + token * size,
                                     s + token * size, to + (token * heads + head) * size, size / 2,
                                     acc_t(inverse ? -1 : 1));
        }
      }
    });
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(archon_cpp, m) {
  m.def("rms_norm(Tensor x_ND, Tensor weight_D, float eps) -> (Tensor, Tensor)");
  m.def("rms_norm_backward(Tensor grad_ND, Tensor x_ND, Tensor weight_D, Tensor scale_N) -> (Tensor, Tensor)");
  m.def("rotate(Tensor x_THd, Tensor cos_Td, Tensor sin_Td, bool inverse) -> Tensor");
}

TORCH_LIBRARY_IMPL(archon_cpp, CPU, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("rms_norm_backward", rms_norm_backward);
  m.impl("rotate", rotate);
}

}  // namespace archon
