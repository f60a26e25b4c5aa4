-- Attaches a call to a known request. ARGV: id, endpoint, attempt. Returns what `attach` answers, or a refusal.
if not registered(ARGV[2]) then
  return UNREGISTERED
end
if call('EXISTS', REQUEST .. ARGV[1]) == 0 then
  return UNKNOWN
end
return attach(ARGV[1], ARGV[2], ARGV[3])
