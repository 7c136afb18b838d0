// Small products and triangular solves, blocked in registers: rows of the left by vectors of the right.
#pragma once

#include "vector.h"

namespace innerloop::INNERLOOP_ISA {

constexpr int kRows = INNERLOOP_ROWS;  // of a tile, which is two vectors wide; its sums fill the registers

// Which part is worth computing. The triangles are those of square matrices with their zeros written out.
enum class Part { all, lower_result, lower_left, upper_left };

// The left factor: element (m, k) is at data[m * step + k], or turned at data[k * step + m].
template <class T>
struct Left {
  const T* data;
  int64_t step;
  bool turned = false;
};
template <class T>
struct Right {
  const T* data;
  int64_t step;
};

// result[m] = keep[m * keep_step] * before[m] + factor[m] * (left * right)[m]; no keep: overwrite, no factor: one.
template <class T>
struct Into {
  T* data;
  int64_t step;
  const T* before = nullptr;
  const T* keep = nullptr;
  int64_t keep_step = 0;
  const T* factor = nullptr;
};

template <class T, int M, int N, bool Turned>
INNERLOOP_INLINE void accumulate(Vec<Sum<T>> (&sum)[M][N], const T* a, int64_t step, const T* b, int64_t right, int64_t n) {
  for (int64_t k = 0; k < n; ++k) {
    Vec<T> x[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) x[j] = load(b + k * right + j * kLanes<T>);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Vec<T> y = splat(Turned ? a[k * step + m] : a[m * step + k]);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) multiply(sum[m][j], y, x[j]);
    }
  }
}

template <class T, int M, int N, bool Turned>
static void tile(const T* a, int64_t step, const T* b, int64_t right, int64_t n, const Into<Sum<T>>& into, int64_t row,
                 int64_t column) {
  const Into<Sum<T>> to = into;  // a copy, which no store can change
  Vec<Sum<T>> sum[M][N] = {};
  accumulate<T, M, N, Turned>(sum, a, step, b, right, n);
  if (to.factor) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sum[m][j] *= to.factor[row + m];
  }
  if (to.before) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const Sum<T> keep = to.keep ? to.keep[(row + m) * to.keep_step] : Sum<T>(1);
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) sum[m][j] += keep * load(to.before + (row + m) * to.step + column + j * kLanes<T>);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(to.data + (row + m) * to.step + column + j * kLanes<T>, sum[m][j]);
}

// Rows shared out to as few tiles as hold them, as evenly as can be: a flat tile waits for its own sums.
struct Shares {
  int64_t tiles, flat, taller;

  explicit Shares(int64_t rows) {
    tiles = (rows + kRows - 1) / kRows;
    flat = tiles ? rows / tiles : 0, taller = rows - flat * tiles;
  }
  int64_t operator[](int64_t tile) const { return flat + (tile < taller); }
};

template <class T, int M, int N, bool Turned>
INNERLOOP_INLINE void tile_of(int64_t rows, const T* a, int64_t step, const T* b, int64_t right, int64_t n,
                              const Into<Sum<T>>& into, int64_t row, int64_t column) {
  if (rows >= M) {
    tile<T, M, N, Turned>(a, step, b, right, n, into, row, column);
  } else if constexpr (M > 1) {
    tile_of<T, M - 1, N, Turned>(rows, a, step, b, right, n, into, row, column);
  }
}

template <class T, int N, bool Turned>
static void strip(Left<T> left, int64_t rows, Right<T> right, int64_t column, int64_t depth, const Into<Sum<T>>& into,
                  Part part) {
  constexpr int64_t deep = Product<T>::deep;
  const Shares shares(rows);
  for (int64_t n = 0, row = 0, some; n < shares.tiles; ++n, row += some) {
    some = shares[n];
    if (part == Part::lower_result && column > row + some - 1) continue;
    const int64_t begin = part == Part::upper_left ? row / deep : 0;
    const int64_t end = part == Part::lower_left ? smaller(depth, (row + some + deep - 1) / deep) : depth;
    const T* a = left.data + (Turned ? begin * left.step + row : row * left.step + begin);
    const T* b = right.data + begin * right.step + column;
    tile_of<T, kRows, N, Turned>(some, a, left.step, b, right.step, end - begin, into, row, column);
  }
}

// `columns` is a multiple of the lanes: rows are padded with zeros. The depth counts T.
template <class T>
static void product(Left<T> left, int64_t rows, Right<T> right, int64_t columns, int64_t depth, const Into<Sum<T>>& into,
                    Part part = Part::all) {
  int64_t column = 0;
  for (; column + 2 * kLanes<T> <= columns; column += 2 * kLanes<T>) {
    if (left.turned) strip<T, 2, true>(left, rows, right, column, depth, into, part);
    else strip<T, 2, false>(left, rows, right, column, depth, into, part);
  }
  if (column < columns) {
    if (left.turned) strip<T, 1, true>(left, rows, right, column, depth, into, part);
    else strip<T, 1, false>(left, rows, right, column, depth, into, part);
  }
}

// One tile of X in (I + stril(A)) X = R, or with the transpose; the rows that it depends on are solved already.
template <class T, int M, int N, bool Turned>
static void solve_tile(const T* a, int64_t step, T* x, int64_t width, int64_t row, int64_t rows) {
  Vec<T> sum[M][N] = {}, value[M][N];
  if (Turned) accumulate<T, M, N, true>(sum, a + (row + M) * step + row, step, x + (row + M) * width, width, rows - row - M);
  else accumulate<T, M, N, false>(sum, a + row * step, step, x, width, row);
  const T* corner = a + row * step + row;
#pragma GCC unroll 16
  for (int i = 0; i < M; ++i) {
    const int m = Turned ? M - 1 - i : i;
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) value[m][j] = load(x + (row + m) * width + j * kLanes<T>) - sum[m][j];
#pragma GCC unroll 16
    for (int before = 0; before < i; ++before) {
      const int s = Turned ? M - 1 - before : before;
      const T factor = Turned ? corner[s * step + m] : corner[m * step + s];
#pragma GCC unroll 4
      for (int j = 0; j < N; ++j) value[m][j] -= factor * value[s][j];
    }
#pragma GCC unroll 4
    for (int j = 0; j < N; ++j) store(x + (row + m) * width + j * kLanes<T>, value[m][j]);
  }
}

template <class T, int M, int N, bool Turned>
INNERLOOP_INLINE void solve_of(int64_t some, const T* a, int64_t step, T* x, int64_t width, int64_t row, int64_t rows) {
  if (some >= M) {
    solve_tile<T, M, N, Turned>(a, step, x, width, row, rows);
  } else if constexpr (M > 1) {
    solve_of<T, M - 1, N, Turned>(some, a, step, x, width, row, rows);
  }
}

template <class T, int N, bool Turned>
static void solve_strip(const T* a, int64_t step, T* x, int64_t width, int64_t rows) {
  const Shares shares(rows);
  for (int64_t n = 0, done = 0, some; n < shares.tiles; ++n, done += some) {
    some = shares[n];
    solve_of<T, kRows, N, Turned>(some, a, step, x, width, Turned ? rows - done - some : done, rows);
  }
}

// Solve (I + stril(A)) X = X in place by substitution, turned with the transpose; A's diagonal and beyond are not read.
// Powers of A are never formed: with repeated keys they overflow what they are to cancel.
template <class T, bool Turned>
static void solve(const T* a, int64_t step, T* x, int64_t width, int64_t rows, int64_t columns) {
  int64_t column = 0;
  for (; column + 2 * kLanes<T> <= columns; column += 2 * kLanes<T>)
    solve_strip<T, 2, Turned>(a, step, x + column, width, rows);
  if (column < columns) solve_strip<T, 1, Turned>(a, step, x + column, width, rows);
}

// Turn a square of as many rows as a vector has lanes: halves change places, then quarters, down to single lanes.
template <class T, int Half>
INNERLOOP_INLINE void exchange(Vec<T> (&x)[kLanes<T>]) {
  constexpr int n = kLanes<T>;
  typename Lanes<T>::bits low{}, high{};
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    const bool upper = i & Half;
    low[i] = upper ? n + i - Half : i;
    high[i] = upper ? n + i : i + Half;
  }
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) {
    if (i & Half) continue;
    const Vec<T> a = x[i], b = x[i + Half];
    x[i] = __builtin_shuffle(a, b, low);
    x[i + Half] = __builtin_shuffle(a, b, high);
  }
  if constexpr (Half > 1) exchange<T, Half / 2>(x);
}

// to[j][i] = from[i][j] for i < rows and j < columns, a multiple of the lanes; zeros pad `to` to full vectors.
template <class T>
static void transpose(const T* from, int64_t step, int64_t rows, int64_t columns, T* to, int64_t width) {
  constexpr int64_t n = kLanes<T>;
  for (int64_t j = 0; j < columns; j += n)
    for (int64_t i = 0; i < rows; i += n) {
      Vec<T> x[n];
#pragma GCC unroll 16
      for (int64_t y = 0; y < n; ++y) x[y] = i + y < rows ? load(from + (i + y) * step + j) : Vec<T>{};
      exchange<T, n / 2>(x);
#pragma GCC unroll 16
      for (int64_t y = 0; y < n; ++y) store(to + (j + y) * width + i, x[y]);
    }
}

}  // namespace innerloop::INNERLOOP_ISA
