# From the markdown that git hosting sites render to what Doxygen 1.9 reads, outside of code:
#   $..$ and ```math            formulas in Doxygen's marks
#   ## Heading                  gets the label that a hosting site gives it, made unique by the file's name
#   [text](path#label)          to a header, a page or a label of a page: a reference; to another file: where it
#                               lies, seen from the pages
# -v source=FOLDER -v pages=FOLDER, absolute paths.

BEGIN { FS = "\n" }

FNR == 1 {
  folder = FILENAME
  sub(/[^\/]*$/, "", folder)
  file = FILENAME
}

/^```math$/ { print "\\f["; math = 1; next }
/^```/ && math { print "\\f]"; math = 0; next }
/^```/ { code = !code }
code || math { print; next }

/^##/ {
  label = tolower($0)
  sub(/^#+ */, "", label)
  gsub(/[^a-z0-9_ -]/, "", label)
  gsub(/ /, "-", label)
  $0 = $0 " {#" label_of(file, label) "}"
}

{
  count = split($0, part, "`")
  for (i = 1; i <= count; i++) {
    text = i % 2 ? formulas(part[i]) : "`" part[i] "`"
    part[i] = text
  }
  line = ""
  for (i = 1; i <= count; i++) line = line part[i]
  print links(line)
}

function formulas(s,  out, at) {
  while (match(s, /\$[^$]+\$/)) {
    out = out substr(s, 1, RSTART - 1) "\\f" substr(s, RSTART, RLENGTH - 1) "\\f$"
    s = substr(s, RSTART + RLENGTH)
  }
  return out s
}

function links(s,  out) {
  while (match(s, /\]\([^) ]+\)/)) {
    out = out substr(s, 1, RSTART + 1) target(substr(s, RSTART + 2, RLENGTH - 3)) ")"
    s = substr(s, RSTART + RLENGTH)
  }
  return out s
}

function target(link,  path, label) {
  if (link ~ /^[a-z]+:/ || link ~ /\.svg$/) return link
  path = label = link
  sub(/#.*$/, "", path)
  label = link ~ /#/ ? substr(link, index(link, "#") + 1) : ""
  path = path == "" ? file : resolve(folder path)
  if (label != "") return "@ref " label_of(path, label)
  if (path == source "/README.md") return "@ref index"
  if (path ~ /\.md$/) return path
  if (index(path, source "/include/") == 1 && path ~ /\.hpp$/) return "@ref " substr(path, length(source "/include/") + 1)
  return up substr(path, length(source) + 2)
}

function label_of(path, label) {
  path = substr(path, length(source) + 2)
  gsub(/[^A-Za-z0-9]/, "-", path)
  return path "-" label
}

# Without folder/.. in it.
function resolve(path) {
  while (sub(/[^\/]+\/\.\.\//, "", path)) {}
  return path
}
