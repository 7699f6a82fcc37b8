# Prints the mutants of a header, one a line: line number, what was done, and the line as it becomes. A sign is
# flipped, a factor or a whole statement deleted. Sizes and addresses are left alone: a wrong one mostly
# crashes, and would only flatter the tests.

function emit(what, mutated) { print FNR "\t" what "\t" mutated }

# The end of the operand that starts at i: a name or number with its members, calls and subscripts, or ( .. ).
function operand_end(s, i,   c, depth) {
  while (i <= length(s)) {
    c = substr(s, i, 1)
    if (c ~ /[A-Za-z0-9_.:]/) { i++; continue }
    if (c == "(" || c == "[") {
      depth = 0
      do {
        c = substr(s, i, 1)
        if (c ~ /[(\[]/) depth++
        if (c ~ /[)\]]/) depth--
        i++
      } while (depth > 0 && i <= length(s))
      continue
    }
    break
  }
  return i
}
# The start of the operand that ends before i.
function operand_start(s, i,   c, depth) {
  while (i > 1) {
    c = substr(s, i - 1, 1)
    if (c ~ /[A-Za-z0-9_.:]/) { i--; continue }
    if (c == ")" || c == "]") {
      depth = 0
      do {
        i--
        c = substr(s, i, 1)
        if (c ~ /[)\]]/) depth++
        if (c ~ /[(\[]/) depth--
      } while (depth > 0 && i > 1)
      continue
    }
    break
  }
  return i
}

/^class Fetch/ { skip = 1 }  # prefetches change no result
skip { if (/^};/) skip = 0; next }

{
  code = $0
  comment = index(code, "//")
  if (comment > 0) code = substr(code, 1, comment - 1)
  if (code ~ /^ *(#|for \(|template|static_assert|using |return \{|public:|private:)|arena|[Ff]etch|next\.|constexpr|operator/) next

  depth = addresses = 0
  for (i = 1; i <= length(code); i++) {
    c = substr(code, i, 1)
    if (c == "(" || c == "[" || c == "{") {
      name = substr(code, operand_start(code, i), i - operand_start(code, i))
      sub(/^.*[.>:]/, "", name)
      is_address[++depth] = c == "[" || (c == "(" && name ~ /^(aligned_row|load_rows?|fill|fill_n|copy_n|transpose|min|max|clamp|round_up|padded|row|rows|head|middleCols|write|read|add|subtract|add_both|load|store|solve_.*|add_.*|carry.*|state|position|at|to|S|M|Map|product_with_tokens|product_with_columns|dR_tile|first_lanes|with_lane|copy)$/)
      addresses += is_address[depth]
    }
    if ((c == ")" || c == "]" || c == "}") && depth > 0) addresses -= is_address[depth--]
    if (addresses > 0 || code ~ /Index|Scalar \*const|\* const [a-z_A-Z]+ =|^ *Scalar\* [a-zA-Z_]+\(.*\) const|\.put\(t0/) continue
    two = substr(code, i, 4)
    if (two == " += ") emit("+= to -=", substr(code, 1, i) "-=" substr(code, i + 3))
    if (two == " -= ") emit("-= to +=", substr(code, 1, i) "+=" substr(code, i + 3))
    if (two == " *= ") emit("*= to =", substr(code, 1, i) "=" substr(code, i + 3))
    three = substr(code, i, 3)
    if (three == " + ") emit("+ to -", substr(code, 1, i) "-" substr(code, i + 2))
    if (three == " - ") emit("- to +", substr(code, 1, i) "+" substr(code, i + 2))
    if (three == " * ") {
      end = operand_end(code, i + 3)
      if (end > i + 3 && substr(code, end, 1) != "<") emit("no factor " substr(code, i + 3, end - i - 3), substr(code, 1, i - 1) substr(code, end))
      start = operand_start(code, i)
      if (start < i && substr(code, start - 1, 1) != ">" && substr(code, start - 3, 3) != " * ")
        emit("no factor " substr(code, start, i - start), substr(code, 1, start - 1) substr(code, i + 3))
    }
    if (substr(code, i, 2) ~ /[ (]-/ && substr(code, i + 2, 1) ~ /[A-Za-z(]/)
      emit("no sign", substr(code, 1, i) substr(code, i + 2))
  }
  # a statement on a line of its own: an assignment or a call
  if (code ~ /^ *[A-Za-z_][A-Za-z0-9_.:>\[\]()*+, <-]*( [-+*]?= .*|\))[;] *$/ && code !~ /^ *(const|return|auto|Scalar|Index|Row|Lanes|Tile)/)
    emit("no statement", "")
}
