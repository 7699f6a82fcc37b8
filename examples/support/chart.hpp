// A line chart as an SVG file.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace examples {

// Points (x[i], y[i]) in the order in which a line joins them. Those that are not finite are left out.
struct Series {
  std::string name;
  std::vector<double> x, y;
  std::string colour{};  // as SVG has it; empty: the next of a list
};

enum class Names { high, low, beside };  // top right, bottom left, or right of the lines

struct Chart {
  std::string title, x_label, y_label;
  std::vector<Series> series;
  bool points = false;                     // a mark at every point
  bool log2_x = false;                     // x by its logarithm, ticks at powers of 2
  bool log10_y = false;                    // y by its logarithm, ticks at powers of 10
  Names names = Names::high;               // where the series' names stand
  std::optional<double> y_min{}, y_max{};  // absent: from the data
};

// Multiples of 1, 2 or 5 times a power of ten in [low, high], about `count` of them.
inline std::vector<double> nice_ticks(double low, double high, int count = 6) {
  if (!(high > low)) return {low};
  const double rough = (high - low) / count, power = std::pow(10, std::floor(std::log10(rough)));
  const double lead = rough / power;
  const double step = power * (lead < 1.5 ? 1 : lead < 3.5 ? 2 : lead < 7.5 ? 5 : 10);
  std::vector<double> ticks;
  for (double i = std::ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; ++i)
    ticks.push_back(i * step);
  return ticks;
}

// The text of the file.
inline std::string svg(const Chart& chart) {
  std::size_t longest = 0;
  for (const Series& s : chart.series) longest = std::max(longest, s.name.size());
  const double name_width = 28 + 7.5 * double(longest);
  constexpr double width = 720, height = 420, left = 64, top = 44, bottom = 52;
  const bool low = chart.names == Names::low, beside = chart.names == Names::beside;
  const double right = beside ? 20 + name_width : 20;
  static constexpr const char* colours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"};
  const auto x_of = [&](double x) { return chart.log2_x ? std::log2(x) : x; };
  const auto y_of = [&](double y) { return chart.log10_y ? std::log10(y) : y; };
  const auto drawn = [&](const Series& s, std::size_t i) {
    return std::isfinite(x_of(s.x[i])) && std::isfinite(y_of(s.y[i]));
  };

  constexpr double infinity = std::numeric_limits<double>::infinity();
  double x_low = infinity, x_high = -infinity, y_low = infinity, y_high = -infinity;
  for (const Series& s : chart.series)
    for (std::size_t i = 0; i < s.x.size(); ++i)
      if (drawn(s, i)) {
        x_low = std::min(x_low, x_of(s.x[i])), x_high = std::max(x_high, x_of(s.x[i]));
        y_low = std::min(y_low, y_of(s.y[i])), y_high = std::max(y_high, y_of(s.y[i]));
      }
  if (x_low > x_high) x_low = x_high = y_low = y_high = 0;  // no points
  const double margin = (y_high - y_low) / 20;
  y_low = chart.y_min ? y_of(*chart.y_min) : y_low - margin;
  y_high = chart.y_max ? y_of(*chart.y_max) : y_high + margin;
  if (!(x_high > x_low)) x_low -= 0.5, x_high += 0.5;
  if (!(y_high > y_low)) y_low -= 0.5, y_high += 0.5;

  const auto at_x = [&](double x) { return left + (x - x_low) / (x_high - x_low) * (width - left - right); };
  const auto at_y = [&](double y) {
    return height - bottom - (y - y_low) / (y_high - y_low) * (height - top - bottom);
  };
  const auto number = [](double x, int decimals) {  // a coordinate
    char text[32];
    std::snprintf(text, sizeof text, "%.*f", decimals, x);
    return std::string(text);
  };
  const auto label = [](double x) {  // of a tick
    char text[32];
    std::snprintf(text, sizeof text, "%.6g", std::abs(x) < 1e-12 ? 0 : x);
    return std::string(text);
  };
  const auto escaped = [](const std::string& text) {
    std::string out;
    for (const char c : text)
      out += c == '<' ? "&lt;" : c == '>' ? "&gt;" : c == '&' ? "&amp;" : std::string(1, c);
    return out;
  };
  std::ostringstream out;
  const auto text = [&](double x, double y, const char* more, const std::string& content) {
    out << "<text x=\"" << number(x, 1) << "\" y=\"" << number(y, 1) << "\" " << more << ">"
        << escaped(content) << "</text>\n";
  };
  const auto line = [&](double x1, double y1, double x2, double y2, const char* colour) {
    out << "<line x1=\"" << number(x1, 1) << "\" y1=\"" << number(y1, 1) << "\" x2=\"" << number(x2, 1)
        << "\" y2=\"" << number(y2, 1) << "\" stroke=\"" << colour << "\"/>\n";
  };

  out << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << " " << height
      << "\" font-family=\"sans-serif\" font-size=\"13\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n";
  text(left, 24, "font-size=\"15\" font-weight=\"bold\"", chart.title);
  const auto ticks = [](double low, double high, int count, bool whole) {
    std::vector<double> all = nice_ticks(low, high, count);
    if (whole) std::erase_if(all, [](double x) { return x != std::floor(x); });
    return all;
  };
  for (const double tick : ticks(y_low, y_high, 6, chart.log10_y)) {
    line(left, at_y(tick), width - right, at_y(tick), "#dddddd");
    text(left - 8, at_y(tick) + 4, "text-anchor=\"end\"", chart.log10_y ? "1e" + label(tick) : label(tick));
  }
  for (const double tick : ticks(x_low, x_high, 8, chart.log2_x)) {
    line(at_x(tick), height - bottom, at_x(tick), height - bottom + 5, "#444444");
    text(at_x(tick), height - bottom + 20, "text-anchor=\"middle\"",
         label(chart.log2_x ? std::exp2(tick) : tick));
  }
  line(left, height - bottom, width - right, height - bottom, "#444444");
  line(left, top, left, height - bottom, "#444444");
  text((left + width - right) / 2, height - 12, "text-anchor=\"middle\"", chart.x_label);
  const std::string turn =
      "text-anchor=\"middle\" transform=\"rotate(-90 16 " + number((top + height - bottom) / 2, 1) + ")\"";
  text(16, (top + height - bottom) / 2, turn.c_str(), chart.y_label);

  const double names = low ? left + 16 : width - (beside ? 10 : right) - name_width;
  double legend = low ? height - bottom + 8 - 20 * double(chart.series.size()) : top + 12;
  for (std::size_t n = 0; n < chart.series.size(); ++n, legend += 20) {
    const Series& s = chart.series[n];
    const std::string colour = s.colour.empty() ? colours[n % std::size(colours)] : s.colour;
    out << "<polyline fill=\"none\" stroke-width=\"1.6\" stroke=\"" << colour << "\" points=\"";
    for (std::size_t i = 0; i < s.x.size(); ++i)
      if (drawn(s, i)) out << number(at_x(x_of(s.x[i])), 1) << "," << number(at_y(y_of(s.y[i])), 1) << " ";
    out << "\"/>\n";
    for (std::size_t i = 0; chart.points && i < s.x.size(); ++i)
      if (drawn(s, i))
        out << "<circle r=\"3\" cx=\"" << number(at_x(x_of(s.x[i])), 1) << "\" cy=\""
            << number(at_y(y_of(s.y[i])), 1) << "\" fill=\"" << colour << "\"/>\n";
    out << "<line x1=\"" << number(names, 1) << "\" y1=\"" << number(legend - 4, 1) << "\" x2=\""
        << number(names + 22, 1) << "\" y2=\"" << number(legend - 4, 1) << "\" stroke-width=\"2.5\" stroke=\""
        << colour << "\"/>\n";
    text(names + 28, legend, "", s.name);
  }
  out << "</svg>\n";
  return out.str();
}

// Throws std::runtime_error if the file cannot be written.
inline void write_chart(const std::string& path, const Chart& chart) {
  std::ofstream out(path);
  out << svg(chart) << std::flush;
  if (!out) throw std::runtime_error("cannot write " + path);
}

}  // namespace examples
