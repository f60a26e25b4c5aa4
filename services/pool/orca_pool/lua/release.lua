-- A master leaves its engine to others. ARGV: engine, owner, term.
if not fenced(ARGV[1], ARGV[2], ARGV[3]) then
  call('HSET', ENGINE .. ARGV[1], 'owner', '')
end
