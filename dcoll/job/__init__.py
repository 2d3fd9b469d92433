"""Who is in the job, and how this process came into it: init() and shutdown(), process sets, timeline, stalls."""
