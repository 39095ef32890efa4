"""From records that come one after the other to the sections of a segment, in bounded memory."""
