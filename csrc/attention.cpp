// Causal attention inside each document of a packed batch; see archon_kernels/attention.py.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "common.h"

namespace archon {
namespace {

// Rows of scores that one product makes, over all query heads that read one key head.
constexpr int64_t kTileRows = 128;

// Queries `first .. last` of a document that starts at row `start`: they see its keys up to `last`.
struct Tile {
  int64_t start, first, last, key_head;
  int64_t queries() const { return last - first; }
};

struct Shape {
  int64_t tokens, heads, key_heads, width, value_width;
  int64_t shared() const { return heads / key_heads; }
  int64_t tile() const { return std::clamp<int64_t>(kTileRows / shared(), 16, kTileRows); }
};

Shape check(const Tensor& q_THd, const Tensor& k_TGd, const Tensor& v_TGd, const Tensor& cu_seqlens) {
  const int64_t tokens = q_THd.size(0);
  TORCH_CHECK(k_TGd.size(0) == tokens && v_TGd.size(0) == tokens, "queries have ", tokens, " tokens, keys ",
              k_TGd.size(0), " and values ", v_TGd.size(0));
  TORCH_CHECK(k_TGd.size(2) == q_THd.size(2) && v_TGd.size(1) == k_TGd.size(1) && k_TGd.size(1) > 0 &&
                  q_THd.size(1) % k_TGd.size(1) == 0,
              "queries ", q_THd.sizes(), " do not fit keys ", k_TGd.sizes(), " and values ", v_TGd.sizes());
  const int64_t* border = cu_seqlens.const_data_ptr<int64_t>();
  const int64_t last = cu_seqlens.numel() - 1;
  TORCH_CHECK(last >= 0 && border[0] == 0 && border[last] == tokens && std::is_sorted(border, border + last + 1),
              "cu_seqlens must rise from 0 to ", tokens);
  return {tokens, q_THd.size(1), k_TGd.size(1), q_THd.size(2), v_TGd.size(2)};
}

// Tiles of each document and key head, together and from the first on.
std::vector<std::vector<Tile>> plan(const Shape& shape, const Tensor& cu_seqlens) {
  const int64_t* border = cu_seqlens.const_data_ptr<int64_t>();
  std::vector<std::vector<Tile>> tiles;
  for (int64_t document = 0; document + 1 < cu_seqlens.numel(); ++document) {
    const int64_t start = border[document], length = border[document + 1] - start;
    for (int64_t head = 0; head < shape.key_heads && length > 0; ++head) {
      auto& own = tiles.emplace_back();
      for (int64_t first = 0; first < length; first += shape.tile()) {
        own.push_back({start, first, std::min(first + shape.tile(), length), head});
      }
    }
  }
  return tiles;
}

// Runs `work(task)` for each task, dealt to the threads in turn. Too few tasks share the threads inside each product.
template <typename Work>
void for_each_task(int64_t tasks, const Work& work) {
  const int64_t threads = at::get_num_threads();
  if (tasks < threads) {
    for (int64_t task = 0; task < tasks; ++task) work(task);
    return;
  }
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    at::AutoDispatchBelowADInplaceOrView guard;  // threads do not inherit it
    for (int64_t thread = begin; thread < end; ++thread) {
      for (int64_t task = thread; task < tasks; task += threads) work(task);
    }
  });
}

template <typename acc_t>
Tensor scratch(int64_t rows, int64_t columns) {
  return at::empty({rows, columns}, at::TensorOptions(c10::CppTypeToScalarType<acc_t>::value));
}

// Rows `first .. last` of one head of `x [T, heads, width]`, times `factor`.
template <typename scalar_t, typename acc_t>
void load_head(const scalar_t* x, int64_t heads, int64_t head, int64_t width, int64_t first, int64_t last, acc_t factor,
               acc_t* to) {
  for (int64_t row = first; row < last; ++row, to += width) {
    const scalar_t* from = x + (row * heads + head) * width;
    for (int64_t d = 0; d < width; ++d) to[d] = widen(from[d]) * factor;
  }
}

template <typename scalar_t, typename acc_t>
void store_head(const acc_t* from, int64_t heads, int64_t head, int64_t width, int64_t first, int64_t last,
                acc_t factor, scalar_t* x) {
  for (int64_t row = first; row < last; ++row, from += width) {
    scalar_t* to = x + (row * heads + head) * width;
    for (int64_t d = 0; d < width; ++d) narrow(from[d] * factor, to[d]);
  }
}

// A tile's rows of all query heads that read its key head, one head after another: `[n * queries, width]`.
template <typename scalar_t, typename acc_t>
Tensor load_queries(const scalar_t* x, const Shape& shape, int64_t width, const Tile& tile, acc_t factor) {
  const int64_t shared = shape.shared(), first = tile.start + tile.first, last = tile.start + tile.last;
  Tensor out = scratch<acc_t>(shared * tile.queries(), width);
  acc_t* to = out.mutable_data_ptr<acc_t>();
  for (int64_t n = 0; n < shared; ++n, to += tile.queries() * width) {
    load_head(x, shape.heads, tile.key_head * shared + n, width, first, last, factor, to);
  }
  return out;
}

template <typename scalar_t, typename acc_t>
void store_queries(const Tensor& from, const Shape& shape, int64_t width, const Tile& tile, acc_t factor, scalar_t* x) {
  const int64_t shared = shape.shared(), first = tile.start + tile.first, last = tile.start + tile.last;
  const acc_t* rows = from.const_data_ptr<acc_t>();
  for (int64_t n = 0; n < shared; ++n, rows += tile.queries() * width) {
    store_head(rows, shape.heads, tile.key_head * shared + n, width, first, last, factor, x);
  }
}

// The document's keys or values that the tile sees: `[last, width]`.
template <typename scalar_t, typename acc_t>
Tensor load_keys(const scalar_t* x, const Shape& shape, int64_t width, const Tile& tile) {
  Tensor out = scratch<acc_t>(tile.last, width);
  load_head(x, shape.key_heads, tile.key_head, width, tile.start, tile.start + tile.last, acc_t(1),
            out.mutable_data_ptr<acc_t>());
  return out;
}

// Scores to exp(score - largest), 0 where the causal mask hides a key; returns the sum, and the largest in `peak`.
template <typename acc_t>
acc_t softmax_row(acc_t* row, int64_t seen, int64_t keys, acc_t& peak) {
  acc_t largest = row[0], total = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t j = 0; j < seen; ++j) largest = row[j] > largest ? row[j] : largest;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < seen; ++j) {
    row[j] = exp_of(row[j] - largest);
    total += row[j];
  }
  std::fill(row + seen, row + keys, acc_t(0));
  peak = largest;
  return total;
}

template <typename scalar_t, typename acc_t>
void attend(const scalar_t* q, const scalar_t* k, const scalar_t* v, const Shape& shape, const Tile& tile,
            scalar_t* out, acc_t* lse) {
  const acc_t scale = acc_t(1) / std::sqrt(acc_t(shape.width));
  const Tensor queries = load_queries(q, shape, shape.width, tile, scale);
  const Tensor keys = load_keys<scalar_t, acc_t>(k, shape, shape.width, tile);
  const Tensor values = load_keys<scalar_t, acc_t>(v, shape, shape.value_width, tile);
  Tensor scores = scratch<acc_t>(queries.size(0), tile.last), mixed = scratch<acc_t>(queries.size(0), shape.value_width);
  at::mm_out(scores, queries, keys.t());
  std::vector<acc_t> totals(queries.size(0));
  for (int64_t row = 0; row < queries.size(0); ++row) {
    const int64_t head = tile.key_head * shape.shared() + row / tile.queries(), query = tile.first + row % tile.queries();
    acc_t peak;
    totals[row] = softmax_row(scores.mutable_data_ptr<acc_t>() + row * tile.last, query + 1, tile.last, peak);
    lse[(tile.start + query) * shape.heads + head] = peak + std::log(totals[row]);
  }
  at::mm_out(mixed, scores, values);
  acc_t* to = mixed.mutable_data_ptr<acc_t>();
  for (int64_t row = 0; row < queries.size(0); ++row) {
    for (int64_t d = 0; d < shape.value_width; ++d) to[row * shape.value_width + d] /= totals[row];
  }
  store_queries(mixed, shape, shape.value_width, tile, acc_t(1), out);
}

std::tuple<Tensor, Tensor> packed_attention(const Tensor& q_THd, const Tensor& k_TGd, const Tensor& v_TGd,
                                            const Tensor& cu_seqlens) {
  const Tensor q = q_THd.contiguous(), k = k_TGd.contiguous(), v = v_TGd.contiguous(), cu = cu_seqlens.contiguous();
  const Shape shape = check(q, k, v, cu);
  std::vector<Tile> tiles;
  for (const auto& own : plan(shape, cu)) tiles.insert(tiles.end(), own.begin(), own.end());
  Tensor out = at::empty({shape.tokens, shape.heads, shape.value_width}, q.options()), lse;
  ARCHON_DISPATCH(q.scalar_type(), "packed_attention", [&] {
    using acc_t = wide_t<scalar_t>;
    lse = scratch<acc_t>(shape.tokens, shape.heads);
    for_each_task(tiles.size(), [&](int64_t task) {
      attend(q.const_data_ptr<scalar_t>(), k.const_data_ptr<scalar_t>(), v.const_data_ptr<scalar_t>(), shape,
             tiles[task], out.mutable_data_ptr<scalar_t>(), lse.mutable_data_ptr<acc_t>());
    });
  });
  return {out, lse};
}

// Scores to probabilities p, and their gradients to those of the scores: p * (dp - sum over the row of out * dout).
template <typename acc_t>
void pull_row(acc_t* scores, acc_t* grad, acc_t lse, acc_t delta, int64_t seen, int64_t keys) {
  for (int64_t j = 0; j < seen; ++j) {
    scores[j] = exp_of(scores[j] - lse);
    grad[j] = scores[j] * (grad[j] - delta);
  }
  if (seen == 1) grad[0] = 0;  // the weight of an only key is 1, whatever its score
  std::fill(scores + seen, scores + keys, acc_t(0));
  std::fill(grad + seen, grad + keys, acc_t(0));
}

template <typename acc_t>
acc_t dot(const acc_t* a, const acc_t* b, int64_t width) {
  acc_t sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t d = 0; d < width; ++d) sum += a[d] * b[d];
  return sum;
}

// One document and key head: the gradient of each tile's queries, and the sums over tiles of those of keys and values.
template <typename scalar_t, typename acc_t>
void pull(const scalar_t* grad, const scalar_t* q, const scalar_t* k, const scalar_t* v, const scalar_t* out,
          const acc_t* lse, const Shape& shape, const std::vector<Tile>& tiles, scalar_t* grad_q, scalar_t* grad_k,
          scalar_t* grad_v) {
  const acc_t scale = acc_t(1) / std::sqrt(acc_t(shape.width));
  const Tile& whole = tiles.back();
  const Tensor all_keys = load_keys<scalar_t, acc_t>(k, shape, shape.width, whole);
  const Tensor all_values = load_keys<scalar_t, acc_t>(v, shape, shape.value_width, whole);
  Tensor sum_k = scratch<acc_t>(whole.last, shape.width).zero_();
  Tensor sum_v = scratch<acc_t>(whole.last, shape.value_width).zero_();
  for (const Tile& tile : tiles) {
    const Tensor queries = load_queries(q, shape, shape.width, tile, scale);
    const Tensor pulls = load_queries(grad, shape, shape.value_width, tile, acc_t(1));
    const Tensor outputs = load_queries(out, shape, shape.value_width, tile, acc_t(1));
    const Tensor keys = all_keys.narrow(0, 0, tile.last), values = all_values.narrow(0, 0, tile.last);
    const int64_t rows = queries.size(0);
    Tensor scores = scratch<acc_t>(rows, tile.last), grad_scores = scratch<acc_t>(rows, tile.last);
    at::mm_out(scores, queries, keys.t());
    at::mm_out(grad_scores, pulls, values.t());
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = tile.key_head * shape.shared() + row / tile.queries();
      const int64_t query = tile.first + row % tile.queries(), width = shape.value_width;
      const acc_t delta = dot(pulls.const_data_ptr<acc_t>() + row * width, outputs.const_data_ptr<acc_t>() + row * width,
                              width);
      pull_row(scores.mutable_data_ptr<acc_t>() + row * tile.last, grad_scores.mutable_data_ptr<acc_t>() + row * tile.last,
               lse[(tile.start + query) * shape.heads + head], delta, query + 1, tile.last);
    }
    sum_v.narrow(0, 0, tile.last).addmm_(scores.t(), pulls);
    sum_k.narrow(0, 0, tile.last).addmm_(grad_scores.t(), queries);
    Tensor pulled = scratch<acc_t>(rows, shape.width);
    at::mm_out(pulled, grad_scores, keys);
    store_queries(pulled, shape, shape.width, tile, scale, grad_q);
  }
  const int64_t first = whole.start, last = whole.start + whole.last;
  store_head(sum_k.const_data_ptr<acc_t>(), shape.key_heads, whole.key_head, shape.width, first, last, acc_t(1), grad_k);
  store_head(sum_v.const_data_ptr<acc_t>(), shape.key_heads, whole.key_head, shape.value_width, first, last, acc_t(1),
             grad_v);
}

std::tuple<Tensor, Tensor, Tensor> packed_attention_backward(const Tensor& grad_THd, const Tensor& q_THd,
                                                             const Tensor& k_TGd, const Tensor& v_TGd,
                                                             const Tensor& cu_seqlens, const Tensor& out_THd,
                                                             const Tensor& lse_TH) {
  const Tensor grad = grad_THd.contiguous(), out = out_THd.contiguous(), lse = lse_TH.contiguous();
  const Tensor q = q_THd.contiguous(), k = k_TGd.contiguous(), v = v_TGd.contiguous(), cu = cu_seqlens.contiguous();
  const Shape shape = check(q, k, v, cu);
  TORCH_CHECK(grad.sizes() == out.sizes() && out.numel() == shape.tokens * shape.heads * shape.value_width &&
                  lse.numel() == shape.tokens * shape.heads,
              "gradients ", grad.sizes(), ", outputs ", out.sizes(), " and sums ", lse.sizes(), " for queries ",
              q.sizes());
  const auto tiles = plan(shape, cu);
  Tensor grad_q = at::empty_like(q), grad_k = at::empty_like(k), grad_v = at::empty_like(v);
  ARCHON_DISPATCH(q.scalar_type(), "packed_attention_backward", [&] {
    using acc_t = wide_t<scalar_t>;
    for_each_task(tiles.size(), [&](int64_t task) {
      pull(grad.const_data_ptr<scalar_t>(), q.const_data_ptr<scalar_t>(), k.const_data_ptr<scalar_t>(),
           v.const_data_ptr<scalar_t>(), out.const_data_ptr<scalar_t>(), lse.const_data_ptr<acc_t>(), shape, tiles[task],
           grad_q.mutable_data_ptr<scalar_t>(), grad_k.mutable_data_ptr<scalar_t>(), grad_v.mutable_data_ptr<scalar_t>());
    });
  });
  return {grad_q, grad_k, grad_v};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(archon_cpp, m) {
  m.def("packed_attention(Tensor q_THd, Tensor k_TGd, Tensor v_TGd, Tensor cu_seqlens) -> (Tensor, Tensor)");
  m.def(
      "packed_attention_backward(Tensor grad_THd, Tensor q_THd, Tensor k_TGd, Tensor v_TGd, "
      "Tensor cu_seqlens, Tensor out_THd, Tensor lse_TH) -> (Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(archon_cpp, CPU, m) {
  m.impl("packed_attention", packed_attention);
  m.impl("packed_attention_backward", packed_attention_backward);
}

}  // namespace archon
