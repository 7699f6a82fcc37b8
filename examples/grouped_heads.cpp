// Grouped heads: 2 query and key heads shared by 6 value heads, checked against a copy of them for each.
#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <iostream>
#include <momentum_delta/momentum_delta.hpp>
#include <vector>

int main() {
  namespace md = momentum_delta;
  const md::Index B = 2, T = 50, HK = 2, HV = 6, K = 16, V = 16;  // value head h reads key head h / (HV / HK)
  const auto random = [](md::Index size) {
    std::vector<float> x(static_cast<std::size_t>(size));
    for (float& value : x) value = Eigen::internal::random<float>(-1, 1);
    return x;
  };
  // [B, T, H, D], as a framework lays them out; a gate is one number a token and value head.
  const std::vector<float> q = random(B * T * HK * K), k = random(B * T * HK * K), v = random(B * T * HV * V);
  const std::vector<float> log_alpha(B * T * HV, -0.1f), log_mu(B * T * HV, -0.5f);
  std::vector<float> keys(B * T * HK * K), p(B * T * HV * K), o(B * T * HV * V), expected(B * T * HV * V);

  // p = alpha k has a head for each gate, that is HV of them.
  md::l2_normalize<float>({k.data(), {B, T, HK, K}}, {keys.data(), {B, T, HK, K}});
  md::decay_keys<float>({keys.data(), {B, T, HK, K}}, {log_alpha.data(), {B, T, HV}},
                        {p.data(), {B, T, HV, K}});
  md::Inputs<float> x{.q = {q.data(), {B, T, HK, K}},
                      .k = {keys.data(), {B, T, HK, K}},
                      .v = {v.data(), {B, T, HV, V}},
                      .p = {p.data(), {B, T, HV, K}},
                      .log_alpha = {log_alpha.data(), {B, T, HV}},
                      .log_mu = {log_mu.data(), {B, T, HV}}};
  md::forward(x, {.o = {o.data(), {B, T, HV, V}}});

  // The same with every key head written out HV / HK times.
  const auto repeat = [&](const std::vector<float>& heads) {
    std::vector<float> out;
    for (auto head = heads.begin(); head != heads.end(); head += K)
      for (md::Index copy = 0; copy < HV / HK; ++copy) out.insert(out.end(), head, head + K);
    return out;
  };
  const std::vector<float> all_q = repeat(q), all_k = repeat(keys);
  x.q = {all_q.data(), {B, T, HV, K}};
  x.k = {all_k.data(), {B, T, HV, K}};
  md::forward(x, {.o = {expected.data(), {B, T, HV, V}}});

  float largest = 0;
  for (std::size_t i = 0; i < o.size(); ++i) largest = std::max(largest, std::abs(o[i] - expected[i]));
  std::cout << q.size() << " numbers in q and k each instead of " << all_q.size() << "; largest difference "
            << largest << "\n";
}
