/// \file
/// Where a backward kernel leaves the gradients of one head of one sequence, and where it reads the upstream
/// ones.
#pragma once

#include "momentum_delta/detail/head.hpp"
#include "momentum_delta/workspace.hpp"

namespace momentum_delta::detail {
inline namespace MOMENTUM_DELTA_TARGET {

// Gradient rows of the tokens from `first` on; data null: not wanted.
template <class Storage>
struct RowsSink {
  Storage* data = nullptr;
  Index stride = 0, cols = 0;
  bool add = false;  // to what is there, or assign
  Index first = 0;

  // n rows at `rows`, `from_stride` apart, from token t on; of each the columns from `column` on.
  template <class Scalar>
  void put(Index t, Index n, Index column, Index width, const Scalar* rows, Index from_stride) const {
    if (data == nullptr) return;
    constexpr Index W = panel_width<Scalar>;
    for (Index i = 0; i < n; ++i) {
      for (Index c = 0; c < width; c += W) {
        const Index part = std::min(W, width - c);
        Storage* const to = data + (t - first + i) * stride + column + c;
        Row<Scalar> row = load_row<Scalar>(rows + i * from_stride + c, part);
        if (add) row += load_row<Scalar>(to, part);
        store_row(row, to, part);
      }
    }
  }
};

template <class Scalar>
struct GateSink {
  Scalar* data = nullptr;
  Index stride = 0;
  bool add = false;

  void put(Index t, Scalar value) const {
    if (data != nullptr) data[t * stride] = add ? data[t * stride] + value : value;
  }
};

// dq, dk and dp are sums over the heads of a group, in Scalars, for some tokens; GroupGradients (below) hands
// them on.
template <class Scalar, class Storage>
struct HeadGradients {
  const Storage* do_ = nullptr;  // T x V; null: 0
  Index do_stride = 0;

  RowsSink<Scalar> dq, dk, dp;
  RowsSink<Storage> dv;
  GateSink<Scalar> dlog_alpha, dlog_mu, dbeta, deta;
};

// The gradients of the value heads that share one query and key, a stretch of tokens at a time.
template <class Scalar, class Storage>
class GroupGradients {
 public:
  // Room for stretches of up to `tokens` tokens.
  GroupGradients(Arena& arena, const Sizes& s, Index tokens)
      : K_(s.K),
        dq_(arena.take<Scalar>(tokens * s.K)),
        dk_(arena.take<Scalar>(tokens * s.K)),
        dp_(arena.take<Scalar>(tokens * s.K)) {}

  // Value head h of one sequence, tokens from `begin` on.
  HeadGradients<Scalar, Storage> head(const Inputs<Scalar, Storage>& x,
                                      const OutputGradients<Scalar, Storage>& dy,
                                      const InputGradients<Scalar, Storage>& dx, const SequenceTokens& tokens,
                                      Index h, Index begin) const {
    const Index group = x.v.shape[2] / x.q.shape[2];
    const auto gate = [&](const GateView<Scalar>& view) -> GateSink<Scalar> {
      const auto& s = view.stride;
      return view.empty() ? GateSink<Scalar>{}
                          : GateSink<Scalar>{view.data + tokens.b * s[0] + tokens.begin * s[1] + h * s[2],
                                             s[1], dx.accumulate};
    };
    const auto sum = [&](const TokenView<Storage>& view, Scalar* rows) -> RowsSink<Scalar> {
      return {view.empty() ? nullptr : rows, K_, K_, view.shape[2] == x.q.shape[2] && h % group != 0, begin};
    };
    HeadGradients<Scalar, Storage> g;
    if (!dy.do_.empty()) {
      const auto& s = dy.do_.stride;
      g.do_ = dy.do_.data + tokens.b * s[0] + tokens.begin * s[1] + h * s[2];
      g.do_stride = s[1];
    }
    g.dq = sum(dx.dq, dq_);
    g.dk = sum(dx.dk, dk_);
    g.dp = sum(dx.dp, dp_);
    if (x.p.absent()) {  // p is k, so its gradient is k's as well
      g.dp = g.dk;
      g.dp.add = true;
    }
    g.dv = memory(dx.dv, tokens, h, dx.accumulate);
    g.dlog_alpha = gate(dx.dlog_alpha);
    g.dlog_mu = gate(dx.dlog_mu);
    g.dbeta = gate(dx.dbeta);
    g.deta = gate(dx.deta);
    return g;
  }

  // After value head h: what is complete of the tokens [begin, end) goes to the caller's memory.
  void finish(const InputGradients<Scalar, Storage>& dx, const SequenceTokens& tokens, Index h, Index HV,
              Index begin, Index end) const {
    const auto put = [&](const TokenView<Storage>& view, const Scalar* rows) {
      if (view.empty()) return;
      const Index group = HV / view.shape[2];
      if ((h + 1) % group != 0) return;
      memory(view, tokens, h / group, dx.accumulate).put(begin, end - begin, 0, K_, rows, K_);
    };
    put(dx.dq, dq_);
    put(dx.dk, dk_);
    put(dx.dp, dp_);
  }

 private:
  static RowsSink<Storage> memory(const TokenView<Storage>& view, const SequenceTokens& tokens, Index head,
                                  bool add) {
    if (view.empty()) return {};
    const auto& s = view.stride;
    return {view.data + tokens.b * s[0] + tokens.begin * s[1] + head * s[2], s[1], view.shape[3], add};
  }

  Index K_;
  Scalar *dq_, *dk_, *dp_;  // tokens x K
};

}  // namespace MOMENTUM_DELTA_TARGET
}  // namespace momentum_delta::detail
